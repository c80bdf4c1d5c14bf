/* Device numbers: this thread's current one, those in this process, and those on the machine (NVML, UUIDs, buses). */
#ifndef FAKEDIST_DEVICES_H
#define FAKEDIST_DEVICES_H
#include "virtual_gpu.h"

#define UUID_SIZE 41

LOCAL int device_count(void); /* devices that CUDA shows: the first call reads CUDA_VISIBLE_DEVICES */
LOCAL int device_current(void);
LOCAL int device_set_current(int device);
LOCAL void *device_context(int device); /* its primary context */
LOCAL int device_of_context(const void *context); /* -1: not a context */
LOCAL int device_installed(int device);
LOCAL int device_visible(int installed); /* -1: CUDA does not show it, or was not asked yet */
LOCAL int device_bus(int device); /* on PCI; domain and slot are 0 */
LOCAL void device_uuid_bytes(int installed, char *bytes); /* 16 of them */
LOCAL void device_uuid(int installed, char *text); /* as nvidia-smi writes it, UUID_SIZE bytes */
#endif
