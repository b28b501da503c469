"""Metal kernels on this machine's processor, for tests.

| file                       | what                                                                      |
|----------------------------|---------------------------------------------------------------------------|
| harness.py                 | `run`, in place of omlxd's call of a kernel; `in_place_of_metal`          |
| source.py                  | the source as MLX prints it, and C++ of it                                |
| msl_on_cpu.h               | the Metal Shading Language's types and functions                          |
| runtime.cpp                | a kernel's threads as fibers, in several orders                           |
| races.h                    | who read and wrote each byte that threads share                           |
| build.py, memory.py        | the compiler, and buffers between fences                                  |
| limits.py, msl_spaces.h    | Apple's limits and refusals, by counts and by clang                       |
| apple.py                   | `xcrun metal`, where there is one                                         |
| mutants.py                 | kernels with a fault, which a check must find                             |
| stand_ins.py, pretended.py | what `--pretend-metal` takes                                              |

tests/metal/conftest.py has the fixtures.
"""
