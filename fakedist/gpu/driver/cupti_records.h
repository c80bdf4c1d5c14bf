/* CUPTI's own structs, written from ours. */
#ifndef FAKEDIST_CUPTI_RECORDS_H
#define FAKEDIST_CUPTI_RECORDS_H
#include "launches.h"

/* An activity. Unknown fields are zero. */
struct activity {
    uint64_t start, end, external, node;
    uint32_t correlation, thread, number, context, stream;
    int external_kind, launch_kind;
    const struct launch *launch;
};
LOCAL int cupti_record_is_known(void); /* whether CUPTI's headers were installed */
LOCAL int cupti_record_version(void);
LOCAL int cupti_record_can_enable(int kind);
LOCAL int cupti_record_can_set(int attribute);
/* CUpti_ActivityKind */
LOCAL int cupti_record_of_launch(int launch_kind);
LOCAL int cupti_record_of_call(int is_runtime);
LOCAL int cupti_record_of_external(void);
LOCAL int cupti_record_of_event(void);
LOCAL int cupti_record_of_wait(void);

LOCAL size_t cupti_record_bytes(int kind);
LOCAL void cupti_record_write(void *out, int kind, const struct activity *from);
#endif
