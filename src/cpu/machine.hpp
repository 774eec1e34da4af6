// The processor: family, model and the features that targets ask for. Read once by CPUID; never a measurement.
#pragma once

#include <string>

namespace logitless::cpu {

struct Features {
  bool avx2 = false;        // AVX2, FMA, F16C and the system's support
  bool avx512 = false;      // AVX-512 F, BW, VL, DQ
  bool avx512bf16 = false;  // VDPBF16PS
  bool amx_bf16 = false;    // AMX-TILE, AMX-BF16, and the kernel's permission
  bool intel = false, amd = false;
  int family = 0, model = 0;
  std::string name;  // as the processor gives it
};

// The first call asks the kernel for AMX's state (Linux arch_prctl), once per process.
const Features& machine();

}  // namespace logitless::cpu
