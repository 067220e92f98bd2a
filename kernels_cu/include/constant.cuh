// A value that the compiler knows, as an argument: the parameter's type carries it into a generic lambda.
#pragma once

template <bool kValue>
struct Constant {
    static constexpr bool value = kValue;
};
