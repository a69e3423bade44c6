// The ops of the draft tree, of sampling and acceptance.
#include <algorithm>

#include "cpu/advance.h"
#include "cpu/kernels.h"
#include "torch_tree_args.h"

namespace {

using namespace eagle::torch_api;

eagle::SampleArgs sample_args(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p) {
    check_rows("logits", logits, {kAny, kAny}, at::kFloat);
    const int64_t rows = logits.size(0);
    EK_REQUIRE(logits.size(1) > 0 && logits.size(1) < (int64_t{1} << 23), "logits: expected a vocabulary of 1 to 8388607, got ", logits.size(1));
    check("temperature", temperature, {rows}, at::kFloat);
    check("top_k", top_k, {rows}, at::kInt);
    check("top_p", top_p, {rows}, at::kFloat);
    check("min_p", min_p, {rows}, at::kFloat);
    eagle::SampleArgs args{};
    args.logits = logits.const_data_ptr<float>();
    args.temperature = temperature.const_data_ptr<float>();
    args.top_k = top_k.const_data_ptr<int32_t>();
    args.top_p = top_p.const_data_ptr<float>();
    args.min_p = min_p.const_data_ptr<float>();
    args.rows = rows;
    args.vocab = logits.size(1);
    args.logits_stride = logits.stride(0);
    args.threads = threads();
    return args;
}

void sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, const Tensor& seeds, const Tensor& positions, bool min_p_first,
            OptionalTensor logit_bias, OptionalTensor repetition_penalty, OptionalTensor presence_penalty, OptionalTensor frequency_penalty, OptionalTensor prompt_mask,
            OptionalTensor output_counts, Tensor out, const std::optional<Tensor>& log_probs) {
    refuse_recording("sample");
    eagle::SampleArgs args = sample_args(logits, temperature, top_k, top_p, min_p);
    check("seeds", seeds, {args.rows}, at::kLong);
    check("positions", positions, {args.rows}, at::kLong);
    check_optional("logit_bias", logit_bias, {args.rows, args.vocab}, at::kFloat);
    check_optional("repetition_penalty", repetition_penalty, {args.rows}, at::kFloat);
    check_optional("presence_penalty", presence_penalty, {args.rows}, at::kFloat);
    check_optional("frequency_penalty", frequency_penalty, {args.rows}, at::kFloat);
    check_optional("prompt_mask", prompt_mask, {args.rows, args.vocab}, at::kBool);
    check_optional("output_counts", output_counts, {args.rows, args.vocab}, at::kInt);
    check("out", out, {args.rows}, at::kLong);
    check_optional("log_probs", log_probs, {args.rows}, at::kFloat);
    args.seeds = seeds.const_data_ptr<int64_t>();
    args.positions = positions.const_data_ptr<int64_t>();
    args.logit_bias = optional_ptr<float>(logit_bias);
    args.repetition_penalty = optional_ptr<float>(repetition_penalty);
    args.presence_penalty = optional_ptr<float>(presence_penalty);
    args.frequency_penalty = optional_ptr<float>(frequency_penalty);
    args.prompt_mask = optional_ptr<bool>(prompt_mask);
    args.output_counts = optional_ptr<int32_t>(output_counts);
    args.tokens = out.mutable_data_ptr<int64_t>();
    args.log_probs = log_probs.has_value() ? log_probs->mutable_data_ptr<float>() : nullptr;
    args.min_p_first = min_p_first;
    eagle::kernels().sample(args);
}

void filter_probs(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, bool min_p_first, Tensor out) {
    refuse_recording("filter_probs");
    eagle::SampleArgs args = sample_args(logits, temperature, top_k, top_p, min_p);
    check("out", out, {args.rows, args.vocab}, at::kFloat);
    args.probs = out.mutable_data_ptr<float>();
    args.min_p_first = min_p_first;
    eagle::kernels().sample(args);
}

void draw_children(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, const Tensor& seeds, const Tensor& positions, int64_t lanes,
                   bool min_p_first, Tensor out) {
    refuse_recording("draw_children");
    eagle::SampleArgs args = sample_args(logits, temperature, top_k, top_p, min_p);
    check("seeds", seeds, {args.rows}, at::kLong);
    check("positions", positions, {args.rows}, at::kLong);
    check("out", out, {args.rows, kAny}, at::kLong);
    EK_REQUIRE(out.size(1) >= 1 && out.size(1) <= eagle::kMaxTopK, "count: expected 1 to ", eagle::kMaxTopK, ", got ", out.size(1));
    EK_REQUIRE(lanes >= 1, "lanes: expected 1 or more, got ", lanes);
    args.seeds = seeds.const_data_ptr<int64_t>();
    args.positions = positions.const_data_ptr<int64_t>();
    args.children = out.mutable_data_ptr<int64_t>();
    args.count = out.size(1);
    args.lanes = lanes;
    args.min_p_first = min_p_first;
    eagle::kernels().sample(args);
}

void noise(const Tensor& seeds, const Tensor& positions, int64_t stream, bool uniform, Tensor out) {
    refuse_recording("noise");
    check("seeds", seeds, {kAny}, at::kLong);
    check("positions", positions, {seeds.size(0)}, at::kLong);
    check("out", out, {seeds.size(0), kAny}, at::kFloat);
    eagle::kernels().noise({seeds.const_data_ptr<int64_t>(), positions.const_data_ptr<int64_t>(), out.mutable_data_ptr<float>(), seeds.size(0), out.size(1), static_cast<uint32_t>(stream), uniform});
}

void expand(const Tensor& logits, const Tensor& frontier_scores, const Tensor& frontier_pool_index, const Tensor& features, const Tensor& frontier_mask, Tensor pool_tokens, Tensor pool_scores,
            Tensor pool_parents, int64_t pool_offset, int64_t top_k, int64_t first_row, OptionalTensor draft_to_target, OptionalTensor choices, Tensor tokens, Tensor scores, Tensor pool_index,
            Tensor next_features, Tensor next_mask) {
    refuse_recording("expand");
    check_rows("logits", logits, {kAny, kAny, kAny}, at::kFloat);
    const int64_t batch = logits.size(0), frontier = logits.size(1), vocab = logits.size(2), next_size = tokens.size(-1);
    check("frontier_scores", frontier_scores, {batch, frontier}, at::kFloat);
    check("frontier_pool_index", frontier_pool_index, {batch, frontier}, at::kInt);
    check_rows("features", features, {batch, frontier, kAny}, at::kFloat);
    const int64_t hidden = features.size(2);
    check("frontier_mask", frontier_mask, {batch, frontier, kAny}, at::kLong);
    const int64_t words = frontier_mask.size(2);
    check("pool.tokens", pool_tokens, {batch, kAny}, at::kLong);
    const int64_t pool = pool_tokens.size(1);
    check("pool.scores", pool_scores, {batch, pool}, at::kFloat);
    check("pool.parents", pool_parents, {batch, pool}, at::kInt);
    check_optional("draft_to_target", draft_to_target, {vocab}, at::kLong);
    check_optional("choices", choices, {next_size}, at::kInt);
    EK_REQUIRE(top_k >= 1 && top_k <= vocab && top_k <= eagle::kMaxTopK, "top_k: expected 1 to ", std::min<int64_t>(vocab, eagle::kMaxTopK), ", got ", top_k);
    EK_REQUIRE(pool_offset >= 0 && pool_offset + frontier * top_k <= pool, "pool_offset: expected 0 to ", pool - frontier * top_k, ", so that frontier * top_k = ", frontier * top_k,
               " candidates fit a pool of ", pool, ", got ", pool_offset);
    EK_REQUIRE(next_size <= frontier * top_k, "next_size: expected at most frontier * top_k = ", frontier * top_k, ", got ", next_size);
    EK_REQUIRE(first_row >= 0 && (next_size == 0 || (first_row + next_size - 1) / 64 < words), "first_row: expected rows that fit a mask of ", words, " words, got ", first_row, " to ", first_row + next_size - 1);
    check_choices(choices, frontier * top_k, false);
    check("tokens", tokens, {batch, next_size}, at::kLong);
    check("scores", scores, {batch, next_size}, at::kFloat);
    check("pool_index", pool_index, {batch, next_size}, at::kInt);
    check("next_features", next_features, {batch, next_size, hidden}, at::kFloat);
    check("next_mask", next_mask, {batch, next_size, words}, at::kLong);
    eagle::kernels().expand({logits.const_data_ptr<float>(), frontier_scores.const_data_ptr<float>(), frontier_pool_index.const_data_ptr<int32_t>(), features.const_data_ptr<float>(),
                             frontier_mask.const_data_ptr<int64_t>(), optional_ptr<int64_t>(draft_to_target), optional_ptr<int32_t>(choices), pool_tokens.mutable_data_ptr<int64_t>(),
                             pool_scores.mutable_data_ptr<float>(), pool_parents.mutable_data_ptr<int32_t>(), tokens.mutable_data_ptr<int64_t>(), scores.mutable_data_ptr<float>(),
                             pool_index.mutable_data_ptr<int32_t>(), next_features.mutable_data_ptr<float>(), next_mask.mutable_data_ptr<int64_t>(), batch, frontier, vocab, hidden, words, pool,
                             pool_offset, top_k, first_row, next_size, {logits.stride(0), logits.stride(1)}, {features.stride(0), features.stride(1)}, threads()});
}

void expand_topk(const Tensor& keys, const Tensor& max, const Tensor& sum_exp, const Tensor& frontier_scores, const Tensor& frontier_pool_index, const Tensor& features, const Tensor& frontier_mask,
                 Tensor pool_tokens, Tensor pool_scores, Tensor pool_parents, int64_t pool_offset, int64_t top_k, int64_t first_row, OptionalTensor draft_to_target, OptionalTensor choices,
                 OptionalTensor seq_lens, int64_t depth, Tensor tokens, Tensor scores, Tensor pool_index, Tensor next_features, Tensor next_mask, const std::optional<Tensor>& position_ids) {
    refuse_recording("expand_topk");
    const eagle::ExpandTopkArgs args = expand_topk_args(kCpu, keys, max, sum_exp, frontier_scores, frontier_pool_index, features, frontier_mask, pool_tokens, pool_scores, pool_parents, pool_offset,
                                                        top_k, first_row, draft_to_target, choices, seq_lens, depth, tokens, scores, pool_index, next_features, next_mask, position_ids);
    check_choices(choices, args.frontier * top_k, false);
    eagle::expand_topk(args);
}

void rerank(const Tensor& pool_tokens, const Tensor& pool_scores, const Tensor& pool_parents, const Tensor& root_tokens, const Tensor& seq_lens, OptionalTensor choices, Tensor tokens, Tensor parent,
            Tensor depth, Tensor mask, Tensor position_ids) {
    refuse_recording("rerank");
    const eagle::RerankArgs args = rerank_args(kCpu, pool_tokens, pool_scores, pool_parents, root_tokens, seq_lens, choices, tokens, parent, depth, mask, position_ids);
    check_choices(choices, args.pool, true);
    const int64_t orphan = eagle::rerank(args);
    EK_REQUIRE(orphan < 0, "pool: entry ", orphan, " was selected without its parent; a child must not outrank its parent");
}

void accept(const Tensor& tokens, const Tensor& parent, const Tensor& sampled, Tensor active, OptionalTensor stop_token_ids, const std::optional<Tensor>& output_ring, Tensor accepted_nodes,
            Tensor num_accepted_drafts, Tensor bonus_token) {
    refuse_recording("accept");
    eagle::accept(accept_args(kCpu, tokens, parent, sampled, active, stop_token_ids, output_ring, accepted_nodes, num_accepted_drafts, bonus_token));
}

void accept_rejection(const Tensor& tokens, const Tensor& parent, const Tensor& target_probs, const Tensor& draft_probs, const Tensor& seeds, const Tensor& positions, const Tensor& active,
                      Tensor accepted_nodes, Tensor num_accepted_drafts, Tensor bonus_token) {
    refuse_recording("accept_rejection");
    check("tokens", tokens, {kAny, kAny}, at::kLong);
    const int64_t batch = tokens.size(0), nodes = tokens.size(1);
    check("parent", parent, {batch, nodes}, at::kInt);
    check("target_probs", target_probs, {batch, nodes, kAny}, at::kFloat);
    const int64_t vocab = target_probs.size(2);
    check("draft_probs", draft_probs, {batch, nodes, vocab}, at::kFloat);
    check("seeds", seeds, {batch}, at::kLong);
    check("positions", positions, {batch}, at::kLong);
    check("active", active, {batch}, at::kBool);
    check("accepted_nodes", accepted_nodes, {batch, kAny}, at::kInt);
    EK_REQUIRE(nodes >= 1 && accepted_nodes.size(1) >= 1, "tokens: expected at least the root");
    check("num_accepted_drafts", num_accepted_drafts, {batch}, at::kInt);
    check("bonus_token", bonus_token, {batch}, at::kLong);
    eagle::kernels().accept_rejection({tokens.const_data_ptr<int64_t>(), parent.const_data_ptr<int32_t>(), target_probs.const_data_ptr<float>(), draft_probs.const_data_ptr<float>(),
                                       seeds.const_data_ptr<int64_t>(), positions.const_data_ptr<int64_t>(), active.const_data_ptr<bool>(), accepted_nodes.mutable_data_ptr<int32_t>(),
                                       num_accepted_drafts.mutable_data_ptr<int32_t>(), bonus_token.mutable_data_ptr<int64_t>(), batch, nodes, vocab, accepted_nodes.size(1) - 1});
}

void compact(Tensor kv_cache, const Tensor& page_table, const Tensor& seq_lens, const Tensor& accepted_nodes, const Tensor& num_accepted_drafts) {
    refuse_recording("compact");
    eagle::compact(compact_args(kCpu, kv_cache, page_table, seq_lens, accepted_nodes, num_accepted_drafts));
}

void advance(const Tensor& tokens, const Tensor& features, const Tensor& accepted_nodes, const Tensor& num_accepted_drafts, const Tensor& bonus_token, const Tensor& active, Tensor seq_lens,
             Tensor root_tokens, Tensor num_pending, Tensor pending_tokens, Tensor pending_features, const std::optional<Tensor>& num_missed, const std::optional<Tensor>& missed_tokens,
             const std::optional<Tensor>& missed_features) {
    refuse_recording("advance");
    check("tokens", tokens, {kAny, kAny}, at::kLong);
    const int64_t batch = tokens.size(0), nodes = tokens.size(1);
    check("features", features, {batch, nodes, kAny}, features.scalar_type());
    const int64_t hidden = features.size(2);
    check("accepted_nodes", accepted_nodes, {batch, kAny}, at::kInt);
    const int64_t width = accepted_nodes.size(1);
    check("num_accepted_drafts", num_accepted_drafts, {batch}, at::kInt);
    check("bonus_token", bonus_token, {batch}, at::kLong);
    check("active", active, {batch}, at::kBool);
    check("seq_lens", seq_lens, {batch}, at::kInt);
    check("root_tokens", root_tokens, {batch}, at::kLong);
    check("num_pending", num_pending, {batch}, at::kLong);
    check("pending_tokens", pending_tokens, {batch, width}, at::kLong);
    check("pending_features", pending_features, {batch, width, hidden}, features.scalar_type());
    const bool keeps = num_missed.has_value();
    TORCH_CHECK_VALUE(keeps == missed_tokens.has_value() && keeps == missed_features.has_value(), "num_missed, missed_tokens, missed_features: expected all of them or none");
    if (keeps) {
        check("num_missed", *num_missed, {batch}, at::kLong);
        check("missed_tokens", *missed_tokens, {batch, kAny}, at::kLong);
        check("missed_features", *missed_features, {batch, missed_tokens->size(1), hidden}, features.scalar_type());
    }
    eagle::advance({tokens.const_data_ptr<int64_t>(), static_cast<const char*>(features.const_data_ptr()), accepted_nodes.const_data_ptr<int32_t>(), num_accepted_drafts.const_data_ptr<int32_t>(),
                    bonus_token.const_data_ptr<int64_t>(), active.const_data_ptr<bool>(), seq_lens.mutable_data_ptr<int32_t>(), root_tokens.mutable_data_ptr<int64_t>(),
                    num_pending.mutable_data_ptr<int64_t>(), pending_tokens.mutable_data_ptr<int64_t>(), static_cast<char*>(pending_features.mutable_data_ptr()),
                    keeps ? num_missed->mutable_data_ptr<int64_t>() : nullptr, keeps ? missed_tokens->mutable_data_ptr<int64_t>() : nullptr,
                    keeps ? static_cast<char*>(missed_features->mutable_data_ptr()) : nullptr, batch, nodes, width, hidden * static_cast<int64_t>(features.element_size()),
                    keeps ? missed_tokens->size(1) : 0});
}

}  // namespace

TORCH_LIBRARY_IMPL(eagle_kernels, CPU, m) {
    m.impl("advance", &advance);
    m.impl("sample", &sample);
    m.impl("filter_probs", &filter_probs);
    m.impl("draw_children", &draw_children);
    m.impl("noise", &noise);
    m.impl("expand", &expand);
    m.impl("expand_topk", &expand_topk);
    m.impl("rerank", &rerank);
    m.impl("accept", &accept);
    m.impl("accept_rejection", &accept_rejection);
    m.impl("compact", &compact);
}
