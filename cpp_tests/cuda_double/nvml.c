/* A libnvidia-ml.so.1 beside the double of the driver, since UCX's module for CUDA links one: NVML
 * without a driver (NVIDIA's "NVML API Reference Guide", nvmlInit_v2). */
#define NVML_ERROR_DRIVER_NOT_LOADED 9

int nvmlInit_v2(void);
int nvmlInit_v2(void) { return NVML_ERROR_DRIVER_NOT_LOADED; }

int nvmlShutdown(void);
int nvmlShutdown(void) { return 1; /* NVML_ERROR_UNINITIALIZED */ }

const char* nvmlErrorString(int error);
const char* nvmlErrorString(int error) {
  return error == NVML_ERROR_DRIVER_NOT_LOADED ? "Driver Not Loaded" : "Uninitialized";
}
