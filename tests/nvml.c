/* A stand-in for NVIDIA's libnvidia-ml.so.1 with what the library asks of it. Its variables, all optional:
   NVML_GPUS: how many. NVML_INIT: what the start answers, "hang" for nothing. NVML_DENIED: index of a GPU of others.
   NVML_CLOCKS: of each GPU, as "00408000", two hex digits of the reasons for which its clocks are low.
   NVML_MIG: MIG devices of each GPU in a row, as "0230"; "-" where one has MIG off. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, NOT_SUPPORTED = 3, NO_PERMISSION = 4, INVALID_ARGUMENT = 2, NOT_FOUND = 6 };

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} Memory;

/* A handle is 1 + a GPU's index, or that + 100 * (1 + the index of its MIG device). */
static int index_of(size_t handle) { return (int)(handle % 100) - 1; }

static const char *variable(const char *name) { return getenv(name) ? getenv(name) : ""; }

static int gpus(void) { return atoi(variable("NVML_GPUS")); }

static char mig(size_t handle) {
    int index = index_of(handle);
    return index < (int)strlen(variable("NVML_MIG")) ? variable("NVML_MIG")[index] : 0;
}

int nvmlInitWithFlags(unsigned flags) {
    while (!strcmp(variable("NVML_INIT"), "hang")) pause();
    return atoi(variable("NVML_INIT"));
}

int nvmlInit(void) { return nvmlInitWithFlags(0); } /* torch's own count begins with this one */

int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int code) { return "an error"; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) { return snprintf(text, size, "570.86") < 0; }

int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12080; return OK; }

int nvmlDeviceGetCount_v2(unsigned *count) { *count = gpus(); return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, size_t *handle) {
    if (getenv("NVML_DENIED") && (int)index == atoi(variable("NVML_DENIED"))) return NO_PERMISSION;
    *handle = index + 1;
    return (int)index < gpus() ? OK : INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, size_t *handle) {
    return nvmlDeviceGetHandleByIndex_v2(atoi(uuid + strlen("GPU-")), handle);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(size_t handle, unsigned long long *reasons) {
    const char *clocks = variable("NVML_CLOCKS");
    char digits[3] = {0};
    if (strlen(clocks) < 2 * (index_of(handle) + 1u)) return NOT_SUPPORTED;
    memcpy(digits, clocks + 2 * index_of(handle), 2);
    *reasons = strtoull(digits, NULL, 16);
    return OK;
}

int nvmlDeviceGetName(size_t handle, char *text, unsigned size) {
    return snprintf(text, size, "NVIDIA H100 80GB HBM3") < 0;
}

int nvmlDeviceGetUUID(size_t handle, char *text, unsigned size) {
    const char *kind = handle > 100 ? "MIG" : "GPU"; /* those of GPU 10 and 11 begin like that of GPU 1 */
    return snprintf(text, size, handle > 100 ? "%s-%d-%zu" : "%s-%d", kind, index_of(handle), handle / 100 - 1) < 0;
}

int nvmlDeviceGetMemoryInfo_v2(size_t handle, Memory *memory) {
    if (index_of(handle) == 7) return 15; /* the GPU is lost */
    memory->total = 81559ULL << 20;
    memory->used = 4ULL << 20;
    return OK;
}

int nvmlDeviceGetMigMode(size_t handle, unsigned *now, unsigned *then) {
    if (!mig(handle)) return NOT_SUPPORTED;
    *now = *then = mig(handle) != '-';
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(size_t handle, unsigned *count) { *count = 7; return OK; }

int nvmlDeviceGetMigDeviceHandleByIndex(size_t handle, unsigned index, size_t *device) {
    *device = handle + 100 * (index + 1);
    return (int)index < mig(handle) - '0' ? OK : NOT_FOUND;
}
