/* CUDA graphs: nodes in the order of their capture, and between them which stream waits for which. To a program, each node
 * depends on the one before it. */
#ifndef FAKEDIST_GRAPHS_H
#define FAKEDIST_GRAPHS_H
#include "launches.h"

/* cudaGraphNodeType */
enum { NODE_KERNEL = 0, NODE_MEMCPY = 1, NODE_MEMSET = 2, NODE_HOST = 3, NODE_CONDITIONAL = 13 };
struct graph_node {
    int type, value;
    uint64_t id; /* as CUPTI reports it: unique among the nodes of all graphs */
    void *to;
    const void *from;
    struct launch launch; /* of a kernel, copy or fill; its stream is that of the capture, 0 where it began */
    void (*function)(void *);
    struct graph *body;
    struct graph_node *before; /* the node that this one depends on */
};
/* A stream of the capture records an event, or waits for one. */
struct graph_order {
    size_t node; /* the node before which it does */
    struct launch launch; /* its event is the number of the record among the graph's orders, from 1 */
};

LOCAL struct graph *graph_create(void);
LOCAL void graph_destroy(struct graph *graph);
LOCAL void graph_add_kernel(struct graph *graph, const struct launch *launch);
LOCAL void graph_add_copy(struct graph *graph, const struct launch *launch, void *to, const void *from);
LOCAL void graph_add_fill(struct graph *graph, const struct launch *launch, void *to, int value);
LOCAL void graph_add_call(struct graph *graph, void (*function)(void *), void *data);
LOCAL struct graph *graph_add_conditional(struct graph *graph, void **node); /* returns its body */
LOCAL void graph_add_order(struct graph *graph, const struct launch *launch);
LOCAL const struct graph_order *graph_orders(const struct graph *graph, size_t *count);
LOCAL struct graph_node *const *graph_nodes(const struct graph *graph, size_t *count);
#endif
