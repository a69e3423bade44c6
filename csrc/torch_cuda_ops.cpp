// The ops of the draft tree on CUDA: the same checks and structs as on the CPU, torch's current stream. Nothing here waits for the device, so all of it can be captured in a graph.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/accept.h"
#include "cuda/compact.h"
#include "cuda/expand_topk.h"
#include "cuda/rerank.h"
#include "torch_tree_args.h"

namespace {

using namespace eagle::torch_api;

// The device that all tensors of a call must share: the first one's, or the current one where that is not on CUDA (the check of the first tensor then fails and says so).
at::Device cuda_device(const Tensor& first) { return first.is_cuda() ? first.device() : at::Device(at::kCUDA, c10::cuda::current_device()); }

template <typename Args>
void launch_cuda(const char* op, cudaError_t (*kernel)(const Args&, cudaStream_t), const Args& args, at::Device device) {
    refuse_recording(op);  // a CUDA graph keeps these calls
    const c10::cuda::CUDAGuard guard(device);
    const cudaError_t error = kernel(args, c10::cuda::getCurrentCUDAStream(device.index()).stream());
    TORCH_CHECK(error == cudaSuccess, op, ": the launch failed on ", device.str(), ": ", cudaGetErrorString(error));
}

void expand_topk(const Tensor& keys, const Tensor& max, const Tensor& sum_exp, const Tensor& frontier_scores, const Tensor& frontier_pool_index, const Tensor& features, const Tensor& frontier_mask,
                 Tensor pool_tokens, Tensor pool_scores, Tensor pool_parents, int64_t pool_offset, int64_t top_k, int64_t first_row, OptionalTensor draft_to_target, OptionalTensor choices,
                 OptionalTensor seq_lens, int64_t depth, Tensor tokens, Tensor scores, Tensor pool_index, Tensor next_features, Tensor next_mask, const std::optional<Tensor>& position_ids) {
    const at::Device device = cuda_device(keys);
    launch_cuda("expand_topk", eagle::cuda::expand_topk,
                expand_topk_args(device, keys, max, sum_exp, frontier_scores, frontier_pool_index, features, frontier_mask, pool_tokens, pool_scores, pool_parents, pool_offset, top_k, first_row,
                                 draft_to_target, choices, seq_lens, depth, tokens, scores, pool_index, next_features, next_mask, position_ids),
                device);
}

void rerank(const Tensor& pool_tokens, const Tensor& pool_scores, const Tensor& pool_parents, const Tensor& root_tokens, const Tensor& seq_lens, OptionalTensor choices, Tensor tokens, Tensor parent,
            Tensor depth, Tensor mask, Tensor position_ids) {
    const at::Device device = cuda_device(pool_tokens);
    const eagle::RerankArgs args = rerank_args(device, pool_tokens, pool_scores, pool_parents, root_tokens, seq_lens, choices, tokens, parent, depth, mask, position_ids);
    EK_REQUIRE(args.choices != nullptr || args.pool <= eagle::cuda::kMaxRerankPool, "pool: expected at most ", eagle::cuda::kMaxRerankPool, " candidates on CUDA, got ", args.pool);
    launch_cuda("rerank", eagle::cuda::rerank, args, device);
}

void accept(const Tensor& tokens, const Tensor& parent, const Tensor& sampled, Tensor active, OptionalTensor stop_token_ids, const std::optional<Tensor>& output_ring, Tensor accepted_nodes,
            Tensor num_accepted_drafts, Tensor bonus_token) {
    const at::Device device = cuda_device(tokens);
    launch_cuda("accept", eagle::cuda::accept, accept_args(device, tokens, parent, sampled, active, stop_token_ids, output_ring, accepted_nodes, num_accepted_drafts, bonus_token), device);
}

void compact(Tensor kv_cache, const Tensor& page_table, const Tensor& seq_lens, const Tensor& accepted_nodes, const Tensor& num_accepted_drafts) {
    const at::Device device = cuda_device(kv_cache);
    const eagle::CompactArgs args = compact_args(device, kv_cache, page_table, seq_lens, accepted_nodes, num_accepted_drafts);
    EK_REQUIRE(args.width <= eagle::cuda::kMaxAcceptedRows, "accepted_nodes: expected at most ", eagle::cuda::kMaxAcceptedRows, " columns on CUDA, got ", args.width);
    launch_cuda("compact", eagle::cuda::compact, args, device);
}

}  // namespace

TORCH_LIBRARY_IMPL(eagle_kernels, CUDA, m) {
    m.impl("expand_topk", &expand_topk);
    m.impl("rerank", &rerank);
    m.impl("accept", &accept);
    m.impl("compact", &compact);
}
