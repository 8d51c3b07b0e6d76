// Graphs: a list of what was captured or added, in that order, done once for each launch. The bodies of a conditional
// node are done once, since no kernel computes its condition.
#include "core.h"

#include <cstring>
#include <memory>
#include <vector>

namespace null_gpu {

using Work = std::function<void()>;

struct Graph;

struct Node {
  CUgraphNodeType type;
  Work work;                                   // null where the node is its graphs
  std::vector<std::shared_ptr<Graph>> graphs;  // children, to which nodes may be added later
};

struct Graph {
  std::vector<std::shared_ptr<Node>> nodes;
};

struct Executable {
  std::vector<std::pair<const Node *, Node>> steps;
  std::vector<std::shared_ptr<Node>> nodes;  // that `steps` point to
};

static Graph *get(CUgraph graph) { return reinterpret_cast<Graph *>(graph); }
static Executable *get(CUgraphExec executable) { return reinterpret_cast<Executable *>(executable); }

static CUresult add(CUgraphNode *handle, CUgraph graph, CUgraphNodeType type, Work work,
                    std::vector<std::shared_ptr<Graph>> graphs = {}) {
  auto &nodes = get(graph)->nodes;
  nodes.push_back(std::make_shared<Node>(Node{type, std::move(work), std::move(graphs)}));
  if (handle) *handle = reinterpret_cast<CUgraphNode>(nodes.back().get());
  return CUDA_SUCCESS;
}

void capture(CUgraph graph, Work work) { add(nullptr, graph, CU_GRAPH_NODE_TYPE_KERNEL, std::move(work)); }

// The node of a child graph, at any depth; null where it is in none.
static Node *inner(const Node &node, CUgraphNode handle) {
  for (auto &graph : node.graphs)
    for (auto &child : graph->nodes) {
      if (child.get() == reinterpret_cast<Node *>(handle)) return child.get();
      if (Node *found = inner(*child, handle)) return found;
    }
  return nullptr;
}

static CUresult replace(CUgraphExec executable, CUgraphNode handle, Work work,
                        std::vector<std::shared_ptr<Graph>> graphs = {}) {
  for (auto &[key, step] : get(executable)->steps) {
    Node *node = key == reinterpret_cast<Node *>(handle) ? &step : inner(step, handle);
    if (node) return *node = {node->type, std::move(work), std::move(graphs)}, CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

// Adds what a node and its child graphs do.
static void collect(const Node &node, std::vector<Work> &works) {
  if (node.work) works.push_back(node.work);
  for (auto &graph : node.graphs)
    for (auto &child : graph->nodes) collect(*child, works);
}

static Work copy_of(const CUDA_MEMCPY3D *p) {
  auto address = [](CUmemorytype type, const void *host, CUdeviceptr device, size_t x) {
    return (type == CU_MEMORYTYPE_HOST ? reinterpret_cast<uintptr_t>(host) : device) + x;
  };
  uintptr_t to = address(p->dstMemoryType, p->dstHost, p->dstDevice, p->dstXInBytes);
  uintptr_t from = address(p->srcMemoryType, p->srcHost, p->srcDevice, p->srcXInBytes);
  size_t bytes = p->WidthInBytes;
  if (p->dstMemoryType != CU_MEMORYTYPE_HOST && p->srcMemoryType != CU_MEMORYTYPE_HOST)
    return [=] { copy_within(to, from, bytes); };
  return [=] { copy_with_host(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes); };
}

static Work fill_of(const CUDA_MEMSET_NODE_PARAMS *p) {
  CUdeviceptr to = p->dst;
  size_t bytes = p->width * p->elementSize;
  return [=] { zero(to, bytes); };
}

static std::shared_ptr<Graph> clone(CUgraph graph) { return std::make_shared<Graph>(*get(graph)); }

}  // namespace null_gpu

using namespace null_gpu;

extern "C" {

CUresult cuGraphCreate(CUgraph *graph, unsigned) {
  *graph = reinterpret_cast<CUgraph>(new Graph);
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) {
  delete get(graph);
  return CUDA_SUCCESS;
}

CUresult cuGraphClone(CUgraph *clone, CUgraph graph) {
  *clone = reinterpret_cast<CUgraph>(new Graph(*get(graph)));
  return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type) {
  *type = reinterpret_cast<Node *>(node)->type;
  return CUDA_SUCCESS;
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *n) {
  for (size_t k = 0; nodes && k < *n; k++) nodes[k] = reinterpret_cast<CUgraphNode>(get(graph)->nodes[k].get());
  if (!nodes) *n = get(graph)->nodes.size();
  return CUDA_SUCCESS;
}

CUresult cuGraphGetRootNodes(CUgraph graph, CUgraphNode *nodes, size_t *n) {
  return cuGraphGetNodes(graph, nodes, n);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *executable, CUgraph graph, unsigned long long) {
  auto *made = new Executable;
  made->nodes = get(graph)->nodes;
  for (auto &node : made->nodes) made->steps.emplace_back(node.get(), *node);
  *executable = reinterpret_cast<CUgraphExec>(made);
  return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *executable, CUgraph graph,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
  params->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
  return cuGraphInstantiateWithFlags(executable, graph, 0);
}

CUresult cuGraphExecDestroy(CUgraphExec executable) {
  delete get(executable);
  return CUDA_SUCCESS;
}

CUresult cuGraphExecUpdate(CUgraphExec executable, CUgraph graph, CUgraphExecUpdateResultInfo *result) {
  auto &nodes = get(graph)->nodes;
  auto &steps = get(executable)->steps;
  memset(result, 0, sizeof *result);
  if (nodes.size() != steps.size()) return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  for (size_t k = 0; k < nodes.size(); k++) steps[k].second = *nodes[k];
  return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
  COUNT;
  show("graph", nullptr, stream);  // one record, where CUPTI has one for each kernel
  std::vector<Work> works;
  for (auto &[key, node] : get(executable)->steps) collect(node, works);
  return enqueue(stream, [works = std::move(works)] {
    for (auto &work : works) work();
  });
}

CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *, const CUgraphEdgeData *, size_t,
                        CUgraphNodeParams *params) {
  std::vector<std::shared_ptr<Graph>> graphs;
  if (params->type == CU_GRAPH_NODE_TYPE_GRAPH) {
    CUgraph child = params->graph.graph;
    bool moved = params->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
    graphs.push_back(moved ? std::shared_ptr<Graph>(get(child)) : clone(child));
  } else if (params->type == CU_GRAPH_NODE_TYPE_CONDITIONAL) {
    auto &conditional = params->conditional;
    conditional.phGraph_out = new CUgraph[conditional.size];
    for (unsigned k = 0; k < conditional.size; k++) {
      cuGraphCreate(&conditional.phGraph_out[k], 0);
      graphs.emplace_back(get(conditional.phGraph_out[k]));
    }
  }
  Work work = params->type == CU_GRAPH_NODE_TYPE_KERNEL ? Work(kernel) : nullptr;
  return add(node, graph, params->type, work, std::move(graphs));
}

CUresult cuGraphConditionalHandleCreate(CUgraphConditionalHandle *handle, CUgraph, CUcontext, unsigned,
                                        unsigned) {
  *handle = reinterpret_cast<CUgraphConditionalHandle>(opaque_handle());
  return CUDA_SUCCESS;
}

CUresult cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *, size_t,
                              const CUDA_KERNEL_NODE_PARAMS *) {
  return add(node, graph, CU_GRAPH_NODE_TYPE_KERNEL, kernel);
}

CUresult cuGraphAddMemcpyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *, size_t,
                              const CUDA_MEMCPY3D *params, CUcontext) {
  return add(node, graph, CU_GRAPH_NODE_TYPE_MEMCPY, copy_of(params));
}

CUresult cuGraphAddMemsetNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *, size_t,
                              const CUDA_MEMSET_NODE_PARAMS *params, CUcontext) {
  return add(node, graph, CU_GRAPH_NODE_TYPE_MEMSET, fill_of(params));
}

CUresult cuGraphAddEmptyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *, size_t) {
  return add(node, graph, CU_GRAPH_NODE_TYPE_EMPTY, nullptr);
}

CUresult cuGraphAddHostNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *, size_t,
                            const CUDA_HOST_NODE_PARAMS *params) {
  CUDA_HOST_NODE_PARAMS host = *params;
  return add(node, graph, CU_GRAPH_NODE_TYPE_HOST, [host] { host.fn(host.userData); });
}

CUresult cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *, size_t, CUgraph child) {
  return add(node, graph, CU_GRAPH_NODE_TYPE_GRAPH, nullptr, {clone(child)});
}

CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec executable, CUgraphNode node, CUgraph child) {
  return replace(executable, node, nullptr, {clone(child)});
}

CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec executable, CUgraphNode node, const CUDA_MEMCPY3D *params,
                                        CUcontext) {
  return replace(executable, node, copy_of(params));
}

CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec executable, CUgraphNode node,
                                        const CUDA_MEMSET_NODE_PARAMS *params, CUcontext) {
  return replace(executable, node, fill_of(params));
}
}
