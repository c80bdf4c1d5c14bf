/* CUDA graphs: how they are made, asked and kept. submit.c launches them. */
#include "graphs.h"

#include "cupti.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct held_object { /* kept alive by the graph: cudaGraphRetainUserObject */
    struct user_object *object;
    unsigned count;
};
struct graph {
    struct graph_node **nodes;
    size_t count, room;
    struct graph_order *orders;
    uint64_t *recorded; /* the event of each order while it was captured */
    size_t num_orders, room_of_orders;
    struct held_object *held;
    size_t num_held;
    int users; /* the graph itself and its instantiations */
};
struct user_object {
    void *pointer;
    void (*destroy)(void *);
    unsigned references;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t num_nodes;

struct graph *graph_create(void) {
    struct graph *g = gpu_new_handle(sizeof *g);
    g->users = 1;
    return g;
}

static struct graph_node *add(struct graph *g, struct graph_node made) {
    struct graph_node *n = gpu_new_handle(sizeof *n);
    assert((made.type == NODE_CONDITIONAL) == (made.body != NULL));
    pthread_mutex_lock(&lock);
    if (g->count == g->room) {
        g->room = g->room ? 2 * g->room : 64;
        g->nodes = realloc(g->nodes, g->room * sizeof *g->nodes);
        if (!g->nodes) abort();
    }
    *n = made;
    n->id = ++num_nodes;
    n->before = g->count ? g->nodes[g->count - 1] : NULL;
    g->nodes[g->count++] = n;
    pthread_mutex_unlock(&lock);
    return n;
}
void graph_add_kernel(struct graph *g, const struct launch *launch) {
    add(g, (struct graph_node){.type = NODE_KERNEL, .launch = *launch});
}
void graph_add_copy(struct graph *g, const struct launch *launch, void *to, const void *from) {
    add(g, (struct graph_node){.type = NODE_MEMCPY, .to = to, .from = from, .launch = *launch});
}
void graph_add_fill(struct graph *g, const struct launch *launch, void *to, int value) {
    add(g, (struct graph_node){.type = NODE_MEMSET, .to = to, .value = value, .launch = *launch});
}
void graph_add_call(struct graph *g, void (*function)(void *), void *data) {
    add(g, (struct graph_node){.type = NODE_HOST, .function = function, .to = data});
}

/* What a stream waits for was recorded in the same capture; else it was over before the graph begins. */
void graph_add_order(struct graph *g, const struct launch *launch) {
    pthread_mutex_lock(&lock);
    struct graph_order made = {g->count, *launch};
    size_t number = g->num_orders;
    if (launch->kind == STREAM_WAITS)
        while (number &&
               (g->orders[number - 1].launch.kind != STREAM_RECORDS || g->recorded[number - 1] != launch->event))
            number--;
    else number++;
    made.launch.event = number;
    if (number) {
        if (g->num_orders == g->room_of_orders) {
            g->room_of_orders = g->room_of_orders ? 2 * g->room_of_orders : 64;
            g->orders = realloc(g->orders, g->room_of_orders * sizeof *g->orders);
            g->recorded = realloc(g->recorded, g->room_of_orders * sizeof *g->recorded);
            if (!g->orders || !g->recorded) abort();
        }
        g->recorded[g->num_orders] = launch->event;
        g->orders[g->num_orders++] = made;
    }
    pthread_mutex_unlock(&lock);
}

static void release_object(struct user_object *object, unsigned count) {
    if (object->references > count) {
        object->references -= count;
        return;
    }
    if (object->destroy) object->destroy(object->pointer);
    free(object);
}

void graph_destroy(struct graph *g) {
    pthread_mutex_lock(&lock);
    assert(g->users > 0);
    int left = --g->users;
    pthread_mutex_unlock(&lock);
    if (left) return;
    for (size_t i = 0; i < g->count; i++) {
        if (g->nodes[i]->body) graph_destroy(g->nodes[i]->body);
        free(g->nodes[i]);
    }
    for (size_t i = 0; i < g->num_held; i++) release_object(g->held[i].object, g->held[i].count);
    free(g->nodes);
    free(g->orders);
    free(g->recorded);
    free(g->held);
    free(g);
}

struct graph_node *const *graph_nodes(const struct graph *g, size_t *count) { return *count = g->count, g->nodes; }
const struct graph_order *graph_orders(const struct graph *g, size_t *count) {
    return *count = g->num_orders, g->orders;
}

API int cudaGraphCreate(void **out, unsigned flags) { return (void)flags, *out = graph_create(), OK; }
API int cudaGraphDestroy(void *graph) { return graph_destroy(graph), OK; }
API int cudaGraphGetNodes(void *graph, void **nodes, size_t *count) {
    struct graph *g = graph;
    if (nodes) memcpy(nodes, g->nodes, (*count < g->count ? *count : g->count) * sizeof *nodes);
    *count = g->count;
    return OK;
}
static int dependencies(void *node, void **nodes, size_t *count) {
    struct graph_node *n = node;
    if (nodes && n->before && *count) nodes[0] = n->before;
    *count = n->before ? 1 : 0;
    return OK;
}
/* Edge data come before the count in CUDA 13. In CUDA 12 this name does not have them. */
API int cudaGraphNodeGetDependencies(void *node, void **nodes, void *edges, size_t *count) {
    return dependencies(node, nodes, model.runtime_version < 13000 ? edges : count);
}
API int cudaGraphNodeGetDependencies_v2(void *node, void **nodes, void *edges, size_t *count) {
    return (void)edges, dependencies(node, nodes, count);
}
API int cudaGraphNodeGetType(void *node, int *type) { return *type = ((struct graph_node *)node)->type, OK; }

API int cudaGraphInstantiate(void **out, void *graph, unsigned long long flags) {
    TRACED;
    struct graph *g = graph;
    (void)flags;
    pthread_mutex_lock(&lock);
    g->users++;
    pthread_mutex_unlock(&lock);
    return *out = g, OK;
}
API int cudaGraphInstantiateWithFlags(void **out, void *graph, unsigned long long flags) {
    TRACED;
    return cudaGraphInstantiate(out, graph, flags);
}
API int cudaGraphExecDestroy(void *exec) { return graph_destroy(exec), OK; }
API int cudaGraphUpload(void *exec, void *stream) { return (void)exec, (void)stream, OK; }
API int cudaGraphDebugDotPrint(void *graph, const char *path, unsigned flags) {
    (void)flags;
    static const char *const names[] = {"kernel", "memcpy", "memset", "host"};
    struct graph *g = graph;
    FILE *file = fopen(path, "w");
    if (!file) return gpu_fail(INVALID_VALUE);
    fprintf(file, "digraph dot {\n");
    for (size_t i = 0; i < g->count; i++) {
        int type = g->nodes[i]->type;
        fprintf(file, "  n%zu [label=\"%zu %s\"];\n", i, i, type <= NODE_HOST ? names[type] : "conditional");
        if (i) fprintf(file, "  n%zu -> n%zu;\n", i - 1, i);
    }
    fprintf(file, "}\n");
    return fclose(file), OK;
}

/* Memory that graphs allocate themselves (cudaMallocAsync while capturing): none here. */
API int cudaDeviceGetGraphMemAttribute(int device, int attribute, void *value) {
    return (void)device, (void)attribute, *(uint64_t *)value = 0, OK;
}
API int cudaDeviceSetGraphMemAttribute(int device, int attribute, void *value) {
    return (void)device, (void)attribute, (void)value, OK;
}
API int cudaDeviceGraphMemTrim(int device) { return (void)device, OK; }

API int cudaUserObjectCreate(void **out, void *pointer, void (*destroy)(void *), unsigned references, unsigned flags) {
    struct user_object *object = gpu_new_handle(sizeof *object);
    (void)flags;
    *object = (struct user_object){pointer, destroy, references};
    return *out = object, OK;
}
API int cudaUserObjectRetain(void *object, unsigned count) {
    return ((struct user_object *)object)->references += count, OK;
}
API int cudaUserObjectRelease(void *object, unsigned count) { return release_object(object, count), OK; }
API int cudaGraphRetainUserObject(void *graph, void *object, unsigned count, unsigned flags) {
    enum { MOVE = 1 }; /* cudaGraphUserObjectMove: the caller's references become the graph's */
    struct graph *g = graph;
    if (!(flags & MOVE)) ((struct user_object *)object)->references += count;
    g->held = realloc(g->held, (g->num_held + 1) * sizeof *g->held);
    if (!g->held) abort();
    g->held[g->num_held++] = (struct held_object){object, count};
    return OK;
}

/* Conditional nodes: the body counts as run once. Called from structs.c, which knows cudaGraphNodeParams. */
struct graph *graph_add_conditional(struct graph *g, void **node) {
    struct graph *body = graph_create();
    *node = add(g, (struct graph_node){.type = NODE_CONDITIONAL, .body = body});
    return body;
}
API int cudaGraphConditionalHandleCreate(uint64_t *out, void *graph, unsigned value, unsigned flags) {
    return (void)graph, (void)value, (void)flags, *out = 1, OK;
}

/* ---- the driver's names for the same ---- */

API int cuGraphCreate(void **out, unsigned flags) { return cudaGraphCreate(out, flags); }
API int cuGraphDestroy(void *graph) { return cudaGraphDestroy(graph); }
API int cuGraphGetNodes(void *graph, void **nodes, size_t *count) { return cudaGraphGetNodes(graph, nodes, count); }
API int cuGraphNodeGetDependencies(void *node, void **nodes, size_t *count) { return dependencies(node, nodes, count); }
API int cuGraphNodeGetDependencies_v2(void *node, void **nodes, void *edges, size_t *count) {
    return (void)edges, dependencies(node, nodes, count);
}
API int cuGraphNodeGetType(void *node, int *type) { return cudaGraphNodeGetType(node, type); }
API int cuGraphInstantiateWithFlags(void **out, void *graph, unsigned long long flags) {
    TRACED;
    return cudaGraphInstantiate(out, graph, flags);
}
API int cuGraphExecDestroy(void *exec) { return cudaGraphExecDestroy(exec); }
API int cuGraphUpload(void *exec, void *stream) { return cudaGraphUpload(exec, stream); }
API int cuGraphDebugDotPrint(void *graph, const char *path, unsigned flags) {
    return QUIET(cudaGraphDebugDotPrint(graph, path, flags));
}
API int cuDeviceGetGraphMemAttribute(int device, int attribute, void *value) {
    return cudaDeviceGetGraphMemAttribute(device, attribute, value);
}
API int cuDeviceSetGraphMemAttribute(int device, int attribute, void *value) {
    return cudaDeviceSetGraphMemAttribute(device, attribute, value);
}
API int cuDeviceGraphMemTrim(int device) { return cudaDeviceGraphMemTrim(device); }
API int cuUserObjectCreate(void **out, void *pointer, void (*destroy)(void *), unsigned references, unsigned flags) {
    return cudaUserObjectCreate(out, pointer, destroy, references, flags);
}
API int cuUserObjectRetain(void *object, unsigned count) { return cudaUserObjectRetain(object, count); }
API int cuUserObjectRelease(void *object, unsigned count) { return cudaUserObjectRelease(object, count); }
API int cuGraphRetainUserObject(void *graph, void *object, unsigned count, unsigned flags) {
    return cudaGraphRetainUserObject(graph, object, count, flags);
}
API int cuGraphConditionalHandleCreate(uint64_t *out, void *graph, void *context, unsigned value, unsigned flags) {
    return (void)context, cudaGraphConditionalHandleCreate(out, graph, value, flags);
}
