# LOGITLESS_CUDA=AUTO|ON|OFF decides whether the CUDA backend is built; LOGITLESS_HAS_CUDA is the answer. AUTO builds it
# where nvcc is found, the host compiler is GCC and no sanitizer is on. Nothing of CUDA but a driver is needed where the
# library runs: cudart is linked statically, cuBLASLt is opened when a device is.

set(LOGITLESS_CUDA AUTO CACHE STRING "CUDA backend: AUTO, ON or OFF")
set_property(CACHE LOGITLESS_CUDA PROPERTY STRINGS AUTO ON OFF)
# sm_90a has instructions of its own; PTX of 80 and 90 is what newer devices compile for themselves.
set(LOGITLESS_CUDA_ARCHITECTURES "80;90a-real;90-virtual" CACHE STRING "CMAKE_CUDA_ARCHITECTURES of the library")

set(LOGITLESS_HAS_CUDA OFF)
if(NOT LOGITLESS_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "LOGITLESS_CUDA is '${LOGITLESS_CUDA}': must be AUTO, ON or OFF")
endif()
if(NOT LOGITLESS_CUDA STREQUAL "OFF")
  find_program(LOGITLESS_NVCC nvcc PATHS /usr/local/cuda/bin)
  mark_as_advanced(LOGITLESS_NVCC)
  set(_suits ON)
  if(LOGITLESS_CUDA STREQUAL "AUTO" AND (LOGITLESS_SANITIZE OR NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU"))
    set(_suits OFF)
  endif()
  if(LOGITLESS_NVCC AND _suits)
    set(LOGITLESS_HAS_CUDA ON)
  elseif(LOGITLESS_CUDA STREQUAL "ON")
    message(FATAL_ERROR "LOGITLESS_CUDA is ON, but nvcc was not found: install CUDA 12.8 or newer, or set it to OFF")
  endif()
endif()
message(STATUS "CUDA backend: ${LOGITLESS_HAS_CUDA}")

if(LOGITLESS_HAS_CUDA)
  # Before the language: nvcc's own default architecture is no longer one.
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES ${LOGITLESS_CUDA_ARCHITECTURES})
  endif()
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER "${LOGITLESS_NVCC}")
  endif()
  if(NOT CMAKE_CUDA_HOST_COMPILER)
    set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
  endif()
  if(LOGITLESS_CCACHE AND NOT DEFINED CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER "${LOGITLESS_CCACHE}")
  endif()
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  find_package(CUDAToolkit 12.8 REQUIRED)
endif()

# Flags of the library's CUDA sources on a target of objects.
function(logitless_cuda_objects target)
  target_compile_definitions(${target} PRIVATE LOGITLESS_HAS_CUDA)
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${LOGITLESS_CUDA_ARCHITECTURES}"
                                             CUDA_VISIBILITY_PRESET hidden)
  # The flag by name: CMake 3.25 does not know C++20 of this compiler.
  #
  # No contraction of a*b+c: the number of roundings must not depend on the compiler. lineinfo costs nothing at run time.
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-fmad=false;--expt-relaxed-constexpr;-lineinfo;--threads=2>")
  if(LOGITLESS_WERROR)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>")
  endif()
  target_include_directories(${target} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
endfunction()
