"""Two GPUs in one process: arrays compute where they are, whichever GPU is the current one, and both at once."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cupyflash

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

OPTIONS = [{}, {"causal": True}, {"window": (40, 10), "softcap": 5.0}]


@pytest.fixture(autouse=True)
def two_gpus():
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")


def arrays_on(gpu, seed=0, shape=(2, 300, 4, 64)):
    """q, k, v and dout, the same numbers on every GPU."""
    with cupy.cuda.Device(gpu):
        random = np.random.default_rng(seed)
        return [cupy.asarray(random.standard_normal(shape, np.float32).astype(np.float16)) for _ in range(4)]


def both(q, k, v, dout, **options):
    """(out, lse, dq, dk, dv)."""
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    return out, lse, *cupyflash.attention_backward(dout, q, k, v, out, lse, deterministic=True, **options)


def assert_same_bits(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert cupy.asnumpy(x).tobytes() == cupy.asnumpy(y).tobytes()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("current", [0, 1])
def test_arrays_compute_where_they_are(current, options):
    """Results lie beside the arguments, the current GPU stays the current one, and both GPUs give the same bits."""
    results = []
    for gpu in (0, 1):
        arrays = arrays_on(gpu)
        with cupy.cuda.Device(current):
            results.append(both(*arrays, **options))
            assert cupy.cuda.Device().id == current
        assert {x.data.device_id for x in results[-1]} == {gpu}
    assert_same_bits(*results)


def test_standard_attention_computes_where_the_arrays_are():
    q, k, v, _ = arrays_on(1)
    expected = cupyflash.standard_attention(*arrays_on(0)[:3])
    out = cupyflash.standard_attention(q, k, v)
    assert out.data.device_id == 1
    assert_same_bits([out], [expected])


def test_both_gpus_at_once():
    """Threads of one process, each with a GPU and a stream of its own: as many calls as it takes to meet."""
    expected = {seed: both(*arrays_on(0, seed), causal=True) for seed in range(2)}

    def work(gpu):
        with cupy.cuda.Device(gpu), cupy.cuda.Stream(non_blocking=True) as stream:
            arrays = {seed: arrays_on(gpu, seed) for seed in range(2)}
            results = [(n % 2, both(*arrays[n % 2], causal=True)) for n in range(40)]
            stream.synchronize()
        return results

    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(work, (0, 1, 0, 1)):
            for seed, result in results:
                assert_same_bits(result, expected[seed])


def test_arrays_on_two_gpus_are_refused():
    q, k, v, _ = arrays_on(0)
    with pytest.raises(ValueError, match=r"k on GPU 1"):
        cupyflash.attention(q, arrays_on(1)[1], v)
    out = arrays_on(1)[0]
    with pytest.raises(ValueError, match=r"out on GPU 1"):
        cupyflash.attention(q, k, v, out=out)
