"""From a kernel's source to a launch: parameter structs, source flattening, and the CUDA and emulated back ends."""
