/* NVML's sensors and what else monitors read. There is nothing to measure: readings are constants of an idle GPU in a
 * server, counted as made up. Numbers and structs are those of nvml.h. */
#include "nvml.h"

#include <stdio.h>
#include <string.h>

enum { IDLE_MILLIWATTS = 70000, LIMIT_MILLIWATTS = 700000, IDLE_CELSIUS = 35, IDLE_MHZ = 345 };
enum { CLOCK_GRAPHICS, CLOCK_SM, CLOCK_MEMORY, CLOCK_VIDEO };

/* ---- readings without a measurement behind them, counted by their kind */

enum { MAX_KINDS = 16 };
static struct {
    const char *name;
    uint64_t calls;
} constants[MAX_KINDS];
static int num_kinds;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void made_up(const char *what) {
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < num_kinds && strcmp(constants[i].name, what)) i++;
    assert(i < MAX_KINDS);
    if (i == num_kinds) constants[num_kinds++].name = what;
    constants[i].calls++;
    pthread_mutex_unlock(&lock);
}

/* The i-th kind of made-up reading and its number of readings; NULL past the end. */
API const char *fakedist_constant(int i, uint64_t *calls) {
    if (i < 0 || i >= num_kinds) return NULL;
    *calls = constants[i].calls;
    return constants[i].name;
}

static int give(const char *what, unsigned *out, unsigned value) { return made_up(what), *out = value, OK; }

/* ---- power, temperature, utilization, clocks */

API int nvmlDeviceGetPowerUsage(void *h, unsigned *out) { return (void)h, give("power", out, IDLE_MILLIWATTS); }
API int nvmlDeviceGetPowerManagementLimit(void *h, unsigned *out) {
    return (void)h, give("power", out, LIMIT_MILLIWATTS);
}
API int nvmlDeviceGetPowerManagementDefaultLimit(void *h, unsigned *out) {
    return (void)h, give("power", out, LIMIT_MILLIWATTS);
}
API int nvmlDeviceGetEnforcedPowerLimit(void *h, unsigned *out) {
    return (void)h, give("power", out, LIMIT_MILLIWATTS);
}
API int nvmlDeviceGetPowerManagementLimitConstraints(void *h, unsigned *least, unsigned *most) {
    return (void)h, *least = IDLE_MILLIWATTS, give("power", most, LIMIT_MILLIWATTS);
}
API int nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *millijoules) {
    return (void)h, made_up("energy"), *millijoules = 0, OK;
}
API int nvmlDeviceGetTemperature(void *h, int sensor, unsigned *out) {
    return (void)h, (void)sensor, give("temperature", out, IDLE_CELSIUS);
}
struct temperature { /* nvmlTemperature_t */
    unsigned version;
    int sensor, celsius;
};
API int nvmlDeviceGetTemperatureV(void *h, struct temperature *out) {
    return (void)h, made_up("temperature"), out->celsius = IDLE_CELSIUS, OK;
}
API int nvmlDeviceGetTemperatureThreshold(void *h, int which, unsigned *out) {
    return (void)h, (void)which, give("temperature", out, 90);
}
API int nvmlDeviceGetFanSpeed(void *h, unsigned *out) { return (void)h, (void)out, NVML_NOT_SUPPORTED; }
struct utilization { /* nvmlUtilization_t: percent of time */
    unsigned gpu, memory;
};
API int nvmlDeviceGetUtilizationRates(void *h, struct utilization *out) {
    return (void)h, made_up("utilization"), *out = (struct utilization){0, 0}, OK;
}
API int nvmlDeviceGetEncoderUtilization(void *h, unsigned *out, unsigned *period_us) {
    return (void)h, *period_us = 0, give("utilization", out, 0);
}
API int nvmlDeviceGetDecoderUtilization(void *h, unsigned *out, unsigned *period_us) {
    return (void)h, *period_us = 0, give("utilization", out, 0);
}
static unsigned most_mhz(int clock) {
    return (unsigned)(clock == CLOCK_MEMORY ? model.memory_clock_khz : model.clock_khz) / 1000;
}
API int nvmlDeviceGetMaxClockInfo(void *h, int clock, unsigned *out) { return (void)h, *out = most_mhz(clock), OK; }
API int nvmlDeviceGetApplicationsClock(void *h, int clock, unsigned *out) {
    return (void)h, give("clock", out, most_mhz(clock));
}
API int nvmlDeviceGetClockInfo(void *h, int clock, unsigned *out) {
    return (void)h, give("clock", out, clock == CLOCK_MEMORY ? most_mhz(clock) : IDLE_MHZ);
}
API int nvmlDeviceGetClock(void *h, int clock, int which, unsigned *out) {
    return (void)which, nvmlDeviceGetClockInfo(h, clock, out);
}
API int nvmlDeviceGetPerformanceState(void *h, int *out) { return (void)h, made_up("clock"), *out = 0, OK; }
enum { REASON_IDLE = 1 };
API int nvmlDeviceGetCurrentClocksEventReasons(void *h, unsigned long long *out) {
    return (void)h, made_up("clock"), *out = REASON_IDLE, OK;
}
API int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, unsigned long long *out) {
    return nvmlDeviceGetCurrentClocksEventReasons(h, out);
}

/* ---- links and errors */

API int nvmlDeviceGetPcieThroughput(void *h, int counter, unsigned *out) {
    return (void)h, (void)counter, give("PCIe throughput", out, 0);
}
API int nvmlDeviceGetCurrPcieLinkWidth(void *h, unsigned *out) { return (void)h, give("PCIe link", out, 16); }
API int nvmlDeviceGetMaxPcieLinkWidth(void *h, unsigned *out) { return (void)h, give("PCIe link", out, 16); }
API int nvmlDeviceGetCurrPcieLinkGeneration(void *h, unsigned *out) { return (void)h, give("PCIe link", out, 5); }
API int nvmlDeviceGetMaxPcieLinkGeneration(void *h, unsigned *out) { return (void)h, give("PCIe link", out, 5); }
API int nvmlDeviceGetEccMode(void *h, unsigned *now, unsigned *next) { return (void)h, *now = *next = 1, OK; }
API int nvmlDeviceGetTotalEccErrors(void *h, int type, int counter, unsigned long long *out) {
    return (void)h, (void)type, (void)counter, made_up("ECC errors"), *out = 0, OK;
}
API int nvmlDeviceGetMemoryErrorCounter(void *h, int type, int counter, int place, unsigned long long *out) {
    return (void)place, nvmlDeviceGetTotalEccErrors(h, type, counter, out);
}

/* ---- facts of the model or of this process */

API int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }
API int nvmlDeviceGetHandleByIndex(unsigned index, void **out) { return nvmlDeviceGetHandleByIndex_v2(index, out); }
API int nvmlDeviceGetHandleByPciBusId(const char *bus_id, void **out) {
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, out);
}
API int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    for (int device = 0; device < model.devices; device++) {
        char known[64];
        void *handle = (void *)(uintptr_t)(device + 1);
        if (!nvmlDeviceGetUUID(handle, known, sizeof known) && !strcmp(known, uuid)) return *out = handle, OK;
    }
    return NVML_NOT_FOUND;
}
API int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }
API int nvmlDeviceGetMinorNumber(void *h, unsigned *out) { return *out = (unsigned)nvml_device(h), OK; }
API int nvmlDeviceGetBrand(void *h, int *out) { return (void)h, *out = 14 /* NVML_BRAND_NVIDIA */, OK; }
API int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) {
    return (void)h, *major = model.major, *minor = model.minor, OK;
}
API int nvmlDeviceGetMemoryBusWidth(void *h, unsigned *bits) {
    return (void)h, *bits = (unsigned)model.memory_bus_bits, OK;
}
API int nvmlDeviceGetPersistenceMode(void *h, int *on) { return (void)h, *on = 1, OK; }
API int nvmlDeviceGetComputeMode(void *h, int *mode) { return (void)h, *mode = 0, OK; }
API int nvmlDeviceGetDisplayActive(void *h, int *on) { return (void)h, *on = 0, OK; }
API int nvmlDeviceGetDisplayMode(void *h, int *on) { return (void)h, *on = 0, OK; }
API int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *next) { return (void)h, *now = *next = 0, OK; }

struct memory_v2 { /* nvmlMemory_v2_t */
    unsigned version;
    unsigned long long total, reserved, free, used;
};
API int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *out) {
    size_t free_bytes, total_bytes;
    nvml_memory_left(handle, &free_bytes, &total_bytes);
    return *out = (struct memory_v2){out->version, total_bytes, 0, free_bytes, total_bytes - free_bytes}, OK;
}
struct process_v2 { /* nvmlProcessInfo_v2_t; later versions are the same */
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};
API int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process_v2 *out) {
    struct holder holders[MAX_HOLDERS + 1];
    unsigned room = *count;
    *count = (unsigned)nvml_holders(handle, holders);
    if (room < *count) return NVML_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++)
        out[i] = (struct process_v2){(unsigned)holders[i].process, holders[i].bytes, ~0u, ~0u};
    return OK;
}
API int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, struct process_v2 *out) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, out);
}
API int nvmlDeviceGetGraphicsRunningProcesses_v3(void *h, unsigned *count, struct process_v2 *out) {
    return (void)h, (void)out, *count = 0, OK;
}
API int nvmlSystemGetProcessName(unsigned pid, char *text, unsigned size) {
    char path[32], name[64] = "";
    snprintf(path, sizeof path, "/proc/%u/comm", pid);
    FILE *file = fopen(path, "r");
    if (!file) return NVML_NOT_FOUND;
    size_t length = fread(name, 1, sizeof name - 1, file);
    fclose(file);
    if (length && name[length - 1] == '\n') name[--length] = 0;
    if (length >= size) return NVML_INSUFFICIENT_SIZE;
    return memcpy(text, name, length + 1), OK;
}
struct pci { /* nvmlPciInfo_t */
    char legacy[16];
    unsigned domain, bus, device, ids, subsystem;
    char bus_id[32];
};
_Static_assert(sizeof(struct pci) == 68 && sizeof(struct memory_v2) == 40, "the caller's have those sizes");
API int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *out) {
    unsigned bus = (unsigned)nvml_device(handle) + 1; /* as in cudaDeviceGetPCIBusId */
    memset(out, 0, sizeof *out);
    out->bus = bus;
    snprintf(out->legacy, sizeof out->legacy, "0000:%02X:00.0", bus & 0xff);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", bus & 0xff);
    return OK;
}
