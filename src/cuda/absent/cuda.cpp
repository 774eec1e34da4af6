// The CUDA backend's face in a build without it: every question is answered, no device is found.
#include "cuda/cuda.hpp"

namespace logitless::cuda {

class Device {};
class Prepared {};

void DeviceDeleter::operator()(Device* device) const { delete device; }
void PreparedDeleter::operator()(Prepared* prepared) const { delete prepared; }

bool built() { return false; }
int device_count(std::string* why) {
  *why = "this build of logitless has no CUDA backend (LOGITLESS_CUDA)";
  return 0;
}
DevicePointer open_device(int, std::string* why) {
  device_count(why);
  return nullptr;
}
plan::GpuMachine machine_of(const Device&) { return {}; }
std::string describe_device(const Device&) { return {}; }
PreparedPointer prepare(Device&, const plan::Plan&, std::string* why) {
  device_count(why);
  return nullptr;
}
std::string run(Prepared&, const Operands&, const ResultViews&, void*, void*, int* status) {
  std::string why;
  device_count(&why);
  *status = 6;
  return why;
}
std::string scale(Device&, const View&, const View&, void*, int* status) {
  std::string why;
  device_count(&why);
  *status = 6;
  return why;
}
std::string check_status(Device&, void*, int*) { return {}; }

}  // namespace logitless::cuda
