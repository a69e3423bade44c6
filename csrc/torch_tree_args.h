// Tensors to argument structs, for the ops whose CPU and CUDA kernels share a struct. Every tensor is expected on `device`.
#pragma once

#include <algorithm>

#include "cpu/accept.h"
#include "cpu/compact.h"
#include "cpu/expand.h"
#include "cpu/expand_topk.h"
#include "cpu/rerank.h"
#include "torch_checks.h"

namespace eagle::torch_api {

// Candidates below `limit`; on the CPU alone, since a value on the device cannot be looked at.
inline void check_choices(OptionalTensor choices, int64_t limit, bool ascending) {
    if (!choices.has_value()) return;
    const int32_t* choice = choices->const_data_ptr<int32_t>();
    for (int64_t i = 0; i < choices->numel(); ++i)
        EK_REQUIRE(choice[i] >= 0 && choice[i] < limit && (!ascending || i == 0 || choice[i] > choice[i - 1]), "choices: expected ", ascending ? "ascending pool indices" : "candidates", " below ", limit,
                   ", got ", choice[i]);
}

inline ExpandTopkArgs expand_topk_args(at::Device device, const Tensor& keys, const Tensor& max, const Tensor& sum_exp, const Tensor& frontier_scores, const Tensor& frontier_pool_index,
                                       const Tensor& features, const Tensor& frontier_mask, const Tensor& pool_tokens, const Tensor& pool_scores, const Tensor& pool_parents, int64_t pool_offset,
                                       int64_t top_k, int64_t first_row, OptionalTensor draft_to_target, OptionalTensor choices, OptionalTensor seq_lens, int64_t depth,
                                       const Tensor& tokens, const Tensor& scores, const Tensor& pool_index, const Tensor& next_features, const Tensor& next_mask,
                                       const std::optional<Tensor>& position_ids) {
    check("keys", keys, {kAny, kAny, kAny, kAny}, at::kLong, device);
    const int64_t batch = keys.size(0), frontier = keys.size(1), tiles = keys.size(2), next_size = tokens.size(-1);
    EK_REQUIRE(top_k >= 1 && top_k <= kMaxTopK, "top_k: expected 1 to ", kMaxTopK, ", got ", top_k);
    check("keys", keys, {batch, frontier, tiles, top_k}, at::kLong, device);
    EK_REQUIRE(frontier <= kMaxTopK, "keys: expected at most ", kMaxTopK, " frontier nodes, got ", frontier);
    EK_REQUIRE(tiles >= 1 && tiles <= kMaxTiles, "keys: expected 1 to ", kMaxTiles, " tiles, got ", tiles);
    check("max", max, {batch, frontier, tiles}, at::kFloat, device);
    check("sum_exp", sum_exp, {batch, frontier, tiles}, at::kFloat, device);
    check("frontier_scores", frontier_scores, {batch, frontier}, at::kFloat, device);
    check("frontier_pool_index", frontier_pool_index, {batch, frontier}, at::kInt, device);
    const at::ScalarType feature_dtype = features.scalar_type();
    EK_REQUIRE(feature_dtype == at::kFloat || feature_dtype == at::kBFloat16 || feature_dtype == at::kHalf, "features: expected float32, bfloat16 or float16, got ", short_name(feature_dtype));
    check_rows("features", features, {batch, frontier, kAny}, feature_dtype, device);
    const int64_t hidden = features.size(2), element = static_cast<int64_t>(features.element_size());
    check("frontier_mask", frontier_mask, {batch, frontier, kAny}, at::kLong, device);
    const int64_t words = frontier_mask.size(2);
    check("pool.tokens", pool_tokens, {batch, kAny}, at::kLong, device);
    const int64_t pool = pool_tokens.size(1);
    check("pool.scores", pool_scores, {batch, pool}, at::kFloat, device);
    check("pool.parents", pool_parents, {batch, pool}, at::kInt, device);
    check_optional("draft_to_target", draft_to_target, {kAny}, at::kLong, device);
    check_optional("choices", choices, {next_size}, at::kInt, device);
    EK_REQUIRE(pool_offset >= 0 && pool_offset + frontier * top_k <= pool, "pool_offset: expected 0 to ", pool - frontier * top_k, ", so that frontier * top_k = ", frontier * top_k,
               " candidates fit a pool of ", pool, ", got ", pool_offset);
    EK_REQUIRE(next_size <= frontier * top_k, "next_size: expected at most frontier * top_k = ", frontier * top_k, ", got ", next_size);
    EK_REQUIRE(first_row >= 0 && (next_size == 0 || (first_row + next_size - 1) / 64 < words), "first_row: expected rows that fit a mask of ", words, " words, got ", first_row, " to ", first_row + next_size - 1);
    check("tokens", tokens, {batch, next_size}, at::kLong, device);
    check("scores", scores, {batch, next_size}, at::kFloat, device);
    check("pool_index", pool_index, {batch, next_size}, at::kInt, device);
    check("next_features", next_features, {batch, next_size, hidden}, feature_dtype, device);
    check("next_mask", next_mask, {batch, next_size, words}, at::kLong, device);
    EK_REQUIRE(seq_lens.has_value() == position_ids.has_value(), "seq_lens: expected with position_ids or not at all");
    check_optional("seq_lens", seq_lens, {batch}, at::kInt, device);
    check_optional("position_ids", position_ids, {batch, next_size}, at::kLong, device);
    return {keys.const_data_ptr<int64_t>(), max.const_data_ptr<float>(), sum_exp.const_data_ptr<float>(), frontier_scores.const_data_ptr<float>(), frontier_pool_index.const_data_ptr<int32_t>(),
            static_cast<const char*>(features.const_data_ptr()), frontier_mask.const_data_ptr<int64_t>(), optional_ptr<int64_t>(draft_to_target), optional_ptr<int32_t>(choices),
            pool_tokens.mutable_data_ptr<int64_t>(), pool_scores.mutable_data_ptr<float>(), pool_parents.mutable_data_ptr<int32_t>(), tokens.mutable_data_ptr<int64_t>(),
            scores.mutable_data_ptr<float>(), pool_index.mutable_data_ptr<int32_t>(), static_cast<char*>(next_features.mutable_data_ptr()), next_mask.mutable_data_ptr<int64_t>(), optional_ptr<int32_t>(seq_lens),
            position_ids.has_value() ? position_ids->mutable_data_ptr<int64_t>() : nullptr, depth, batch, frontier, tiles, draft_to_target.has_value() ? draft_to_target->size(0) : 0, hidden * element, words, pool, pool_offset, top_k, first_row, next_size,
            {features.stride(0) * element, features.stride(1) * element}};
}

inline RerankArgs rerank_args(at::Device device, const Tensor& pool_tokens, const Tensor& pool_scores, const Tensor& pool_parents, const Tensor& root_tokens, const Tensor& seq_lens,
                              OptionalTensor choices, const Tensor& tokens, const Tensor& parent, const Tensor& depth, const Tensor& mask, const Tensor& position_ids) {
    check("pool.tokens", pool_tokens, {kAny, kAny}, at::kLong, device);
    const int64_t batch = pool_tokens.size(0), pool = pool_tokens.size(1), nodes = tokens.size(-1);
    check("pool.scores", pool_scores, {batch, pool}, at::kFloat, device);
    check("pool.parents", pool_parents, {batch, pool}, at::kInt, device);
    check("root_tokens", root_tokens, {batch}, at::kLong, device);
    check("seq_lens", seq_lens, {batch}, at::kInt, device);
    check_optional("choices", choices, {nodes - 1}, at::kInt, device);
    EK_REQUIRE(nodes >= 1 && nodes - 1 <= pool && nodes <= 256, "num_nodes: expected 1 to ", std::min<int64_t>(pool + 1, 256), ", got ", nodes);
    const int64_t words = (nodes + 63) / 64;
    check("tokens", tokens, {batch, nodes}, at::kLong, device);
    check("parent", parent, {batch, nodes}, at::kInt, device);
    check("depth", depth, {batch, nodes}, at::kInt, device);
    check("packed_ancestor_mask", mask, {batch, nodes, words}, at::kLong, device);
    check("position_ids", position_ids, {batch, nodes}, at::kLong, device);
    return {pool_tokens.const_data_ptr<int64_t>(), pool_scores.const_data_ptr<float>(), pool_parents.const_data_ptr<int32_t>(), root_tokens.const_data_ptr<int64_t>(),
            seq_lens.const_data_ptr<int32_t>(), optional_ptr<int32_t>(choices), tokens.mutable_data_ptr<int64_t>(), parent.mutable_data_ptr<int32_t>(), depth.mutable_data_ptr<int32_t>(),
            mask.mutable_data_ptr<int64_t>(), position_ids.mutable_data_ptr<int64_t>(), batch, pool, nodes, words};
}

inline AcceptArgs accept_args(at::Device device, const Tensor& tokens, const Tensor& parent, const Tensor& sampled, const Tensor& active, OptionalTensor stop_token_ids, OptionalTensor output_ring,
                              const Tensor& accepted_nodes, const Tensor& num_accepted_drafts, const Tensor& bonus_token) {
    check("tokens", tokens, {kAny, kAny}, at::kLong, device);
    const int64_t batch = tokens.size(0), nodes = tokens.size(1);
    check("parent", parent, {batch, nodes}, at::kInt, device);
    check("sampled", sampled, {batch, nodes}, at::kLong, device);
    check("active", active, {batch}, at::kBool, device);
    check("accepted_nodes", accepted_nodes, {batch, kAny}, at::kInt, device);
    EK_REQUIRE(nodes >= 1 && accepted_nodes.size(1) >= 1, "tokens: expected at least the root");
    const int64_t max_depth = accepted_nodes.size(1) - 1;
    check("num_accepted_drafts", num_accepted_drafts, {batch}, at::kInt, device);
    check("bonus_token", bonus_token, {batch}, at::kLong, device);
    check_optional("stop_token_ids", stop_token_ids, {batch, kAny}, at::kLong, device);
    check_optional("output_ring", output_ring, {batch, kAny}, at::kLong, device);
    const int64_t ring_size = output_ring.has_value() ? output_ring->size(1) - 1 : 0;
    EK_REQUIRE(!output_ring.has_value() || ring_size > max_depth, "output_ring: expected at least max_depth + 2 = ", max_depth + 2, " columns, got ", ring_size + 1);
    return {tokens.const_data_ptr<int64_t>(), parent.const_data_ptr<int32_t>(), sampled.const_data_ptr<int64_t>(), active.mutable_data_ptr<bool>(), optional_ptr<int64_t>(stop_token_ids),
            output_ring.has_value() ? output_ring->mutable_data_ptr<int64_t>() : nullptr, accepted_nodes.mutable_data_ptr<int32_t>(), num_accepted_drafts.mutable_data_ptr<int32_t>(),
            bonus_token.mutable_data_ptr<int64_t>(), batch, nodes, max_depth, stop_token_ids.has_value() ? stop_token_ids->size(1) : 0, ring_size};
}

inline CompactArgs compact_args(at::Device device, const Tensor& kv_cache, const Tensor& page_table, const Tensor& seq_lens, const Tensor& accepted_nodes, const Tensor& num_accepted_drafts) {
    check("kv_cache", kv_cache, {kAny, 2, kAny, kAny, kAny, kAny}, kv_cache.scalar_type(), device);
    check("page_table", page_table, {kAny, kAny}, at::kInt, device);
    const int64_t batch = page_table.size(0);
    check("seq_lens", seq_lens, {batch}, at::kInt, device);
    check("accepted_nodes", accepted_nodes, {batch, kAny}, at::kInt, device);
    check("num_accepted_drafts", num_accepted_drafts, {batch}, at::kInt, device);
    return {static_cast<char*>(kv_cache.mutable_data_ptr()), page_table.const_data_ptr<int32_t>(), seq_lens.const_data_ptr<int32_t>(), accepted_nodes.const_data_ptr<int32_t>(),
            num_accepted_drafts.const_data_ptr<int32_t>(), kv_cache.size(0), kv_cache.size(2), kv_cache.size(3),
            kv_cache.size(4) * kv_cache.size(5) * static_cast<int64_t>(kv_cache.element_size()), batch, page_table.size(1), accepted_nodes.size(1)};
}

}  // namespace eagle::torch_api
