// Tensors to argument structs: the ops of the library `eagle_kernels`, their checks, and the Python module that carries them.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>

#include <functional>
#include <initializer_list>
#include <sstream>
#include <string>

#include "cpu/accept.h"
#include "cpu/compact.h"
#include "cpu/kernels.h"
#include "cpu/rerank.h"

namespace {

using at::Tensor;
using eagle::Dtype;
using OptionalTensor = const std::optional<Tensor>&;

constexpr int64_t kAny = -1;

std::string short_name(at::ScalarType dtype) {
    switch (dtype) {
        case at::kFloat: return "float32";
        case at::kDouble: return "float64";
        case at::kHalf: return "float16";
        case at::kBFloat16: return "bfloat16";
        case at::kLong: return "int64";
        case at::kInt: return "int32";
        case at::kBool: return "bool";
        default: return c10::toString(dtype);
    }
}

// "name: expected [4, *] int32 on cpu, got [4, 8] int64 on cpu"
[[noreturn]] void fail(const char* name, const Tensor& t, std::initializer_list<int64_t> shape, const std::string& dtype, const char* extra) {
    std::ostringstream message;
    message << name << ": expected [";
    const char* separator = "";
    for (int64_t size : shape) {
        message << separator;
        if (size == kAny) message << "*";
        else message << size;
        separator = ", ";
    }
    message << "] " << dtype << extra << " on cpu, got [";
    separator = "";
    for (int64_t size : t.sizes()) message << separator << size, separator = ", ";
    message << "] " << short_name(t.scalar_type()) << (t.is_contiguous() ? "" : " (not contiguous)") << " on " << t.device().str();
    C10_THROW_ERROR(ValueError, message.str());
}

bool fits(const Tensor& t, std::initializer_list<int64_t> shape) {
    if (!t.is_cpu() || t.dim() != static_cast<int64_t>(shape.size())) return false;
    int64_t i = 0;
    for (int64_t size : shape) {
        if (size != kAny && t.size(i) != size) return false;
        ++i;
    }
    return true;
}

// Contiguous tensor of this shape and dtype.
void check(const char* name, const Tensor& t, std::initializer_list<int64_t> shape, at::ScalarType dtype) {
    if (!fits(t, shape) || t.scalar_type() != dtype || !t.is_contiguous()) fail(name, t, shape, short_name(dtype), ", contiguous");
}
// Its last dimension must be contiguous, the others may have any stride.
void check_rows(const char* name, const Tensor& t, std::initializer_list<int64_t> shape, at::ScalarType dtype) {
    if (!fits(t, shape) || t.scalar_type() != dtype || (t.numel() > 0 && t.size(-1) > 1 && t.stride(-1) != 1)) fail(name, t, shape, short_name(dtype), ", last dimension contiguous");
}
void check_optional(const char* name, OptionalTensor t, std::initializer_list<int64_t> shape, at::ScalarType dtype) {
    if (t.has_value()) check(name, *t, shape, dtype);
}
template <typename T>
const T* optional_ptr(OptionalTensor t) { return t.has_value() ? t->const_data_ptr<T>() : nullptr; }

#define EK_REQUIRE(condition, ...) TORCH_CHECK_VALUE(condition, __VA_ARGS__)

Dtype weight_dtype(const char* name, const Tensor& t) {
    EK_REQUIRE(t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16, name, ": expected float32 or bfloat16, got ", short_name(t.scalar_type()));
    return t.scalar_type() == at::kFloat ? Dtype::fp32 : Dtype::bf16;
}

// Recording: while one is open on a thread, every op that the thread runs is also kept, with its arguments and the tensors behind them, so that the whole sequence can be
// run again without Python or the dispatcher in between. It is the CPU's counterpart of a captured graph: same buffers, same shapes, new contents.
struct Recording {
    std::vector<std::function<void()>> calls;
    std::vector<Tensor> tensors;
};
thread_local Recording* recording = nullptr;

template <typename Call>
void launch(Call call, std::initializer_list<Tensor> tensors) {
    call();
    if (recording == nullptr) return;
    recording->calls.emplace_back(std::move(call));
    recording->tensors.insert(recording->tensors.end(), tensors);
}

// For ops whose result the host reads, or that are not worth it.
void refuse_recording(const char* op) { TORCH_CHECK(recording == nullptr, op, ": cannot be recorded"); }

// torch.set_num_threads holds for the kernels too.
int threads() { return at::get_num_threads(); }

// A packed weight, with or without experts, and the x [rows, K] that it is multiplied with. Of a bf16 weight only K rounded up to even is known.
void check_packed(const Tensor& x, const Tensor& weight, int64_t out_features, bool experts) {
    const bool pairs = weight_dtype("weight", weight) == Dtype::bf16;
    if (experts) check("weight", weight, {kAny, (out_features + 15) / 16, kAny, 16}, weight.scalar_type());
    else check("weight", weight, {(out_features + 15) / 16, kAny, 16}, weight.scalar_type());
    const int64_t depth = weight.size(experts ? 2 : 1);
    check_rows("x", x, {kAny, kAny}, at::kFloat);
    if ((pairs ? (x.size(1) + 1) / 2 * 2 : x.size(1)) != depth) fail("x", x, {kAny, depth}, "float32", "");
}

void linear(const Tensor& x, const Tensor& weight, OptionalTensor bias, int64_t out_features, Tensor out) {
    check_packed(x, weight, out_features, false);
    check_optional("bias", bias, {out_features}, at::kFloat);
    check_rows("out", out, {x.size(0), out_features}, at::kFloat);
    const eagle::LinearArgs args{x.const_data_ptr<float>(), weight.const_data_ptr(), optional_ptr<float>(bias), nullptr, out.mutable_data_ptr<float>(), x.size(0), x.size(1), out_features,
                             x.stride(0), out.stride(0), 1, weight_dtype("weight", weight), threads()};
    launch([args] { eagle::kernels().linear(args); }, {x, weight, bias.has_value() ? *bias : Tensor(), out});
}

void expert_linear(const Tensor& x, const Tensor& weight, const Tensor& expert_ids, int64_t out_features, Tensor out) {
    refuse_recording("expert_linear");
    check_packed(x, weight, out_features, true);
    const Dtype dtype = weight_dtype("weight", weight);
    check("expert_ids", expert_ids, {x.size(0)}, at::kInt);
    check_rows("out", out, {x.size(0), out_features}, at::kFloat);
    eagle::kernels().linear({x.const_data_ptr<float>(), weight.const_data_ptr(), nullptr, expert_ids.const_data_ptr<int32_t>(), out.mutable_data_ptr<float>(), x.size(0), x.size(1),
                             out_features, x.stride(0), out.stride(0), weight.size(0), dtype, threads()});
}

void embedding(const Tensor& ids, const Tensor& weight, int64_t out_features, Tensor out) {
    check("ids", ids, {kAny}, at::kLong);
    check("out", out, {ids.size(0), kAny}, at::kFloat);
    check_packed(out, weight, out_features, false);
    const int64_t* id = ids.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < ids.size(0); ++i) EK_REQUIRE(id[i] < out_features, "ids: expected token ids below ", out_features, ", got ", id[i]);
    const eagle::EmbeddingArgs args{id, weight.const_data_ptr(), out.mutable_data_ptr<float>(), ids.size(0), out.size(1), out_features, weight_dtype("weight", weight)};
    launch([args] { eagle::kernels().embedding(args); }, {ids, weight, out});
}

void rms_norm(const Tensor& x, const Tensor& weight, double eps, const std::optional<Tensor>& residual, Tensor out) {
    EK_REQUIRE(x.dim() == 2 || x.dim() == 3, "x: expected 2 or 3 dimensions, got ", x.dim());
    const bool three = x.dim() == 3;
    const int64_t outer = x.size(0), inner = three ? x.size(1) : 1, size = x.size(-1);
    if (three) check_rows("x", x, {outer, inner, size}, at::kFloat), check_rows("out", out, {outer, inner, size}, at::kFloat);
    else check_rows("x", x, {outer, size}, at::kFloat), check_rows("out", out, {outer, size}, at::kFloat);
    check("weight", weight, {size}, at::kFloat);
    if (residual.has_value()) {
        if (three) check("residual", *residual, {outer, inner, size}, at::kFloat);
        else check("residual", *residual, {outer, size}, at::kFloat);
    }
    const eagle::RmsNormArgs args{x.const_data_ptr<float>(), weight.const_data_ptr<float>(), residual.has_value() ? residual->mutable_data_ptr<float>() : nullptr, out.mutable_data_ptr<float>(),
                               outer, inner, size, x.stride(0), three ? x.stride(1) : 0, out.stride(0), three ? out.stride(1) : 0, static_cast<float>(eps), threads()};
    launch([args] { eagle::kernels().rms_norm(args); }, {x, weight, residual.has_value() ? *residual : Tensor(), out});
}

void silu_mul(const Tensor& gate_up, Tensor out) {
    check_rows("gate_up", gate_up, {kAny, kAny}, at::kFloat);
    EK_REQUIRE(gate_up.size(1) % 2 == 0, "gate_up: expected an even last dimension (gate, then up), got ", gate_up.size(1));
    check_rows("out", out, {gate_up.size(0), gate_up.size(1) / 2}, at::kFloat);
    const eagle::SiluMulArgs args{gate_up.const_data_ptr<float>(), out.mutable_data_ptr<float>(), gate_up.size(0), gate_up.size(1) / 2, gate_up.stride(0), out.stride(0), threads()};
    launch([args] { eagle::kernels().silu_mul(args); }, {gate_up, out});
}

void route_experts(const Tensor& logits, bool normalize, Tensor weights, Tensor expert_ids) {
    refuse_recording("route_experts");
    check("router_logits", logits, {kAny, kAny}, at::kFloat);
    check("weights", weights, {logits.size(0), kAny}, at::kFloat);
    EK_REQUIRE(weights.size(1) >= 1 && weights.size(1) <= logits.size(1), "top_k: expected 1 to ", logits.size(1), " experts, got ", weights.size(1));
    check("expert_ids", expert_ids, {logits.size(0), weights.size(1)}, at::kInt);
    eagle::kernels().route_experts({logits.const_data_ptr<float>(), weights.mutable_data_ptr<float>(), expert_ids.mutable_data_ptr<int32_t>(), logits.size(0), logits.size(1), weights.size(1), normalize});
}

void rope_store_kv(Tensor q, const Tensor& k, const Tensor& v, const Tensor& position_ids, const Tensor& rope_table, Tensor kv_cache, const Tensor& page_table, const Tensor& seq_lens, int64_t row_offset) {
    check_rows("q", q, {kAny, kAny, kAny, kAny}, at::kFloat);
    const int64_t batch = q.size(0), queries = q.size(1), head_dim = q.size(3);
    check_rows("k", k, {batch, queries, kAny, head_dim}, at::kFloat);
    const int64_t kv_heads = k.size(2);
    check_rows("v", v, {batch, queries, kv_heads, head_dim}, at::kFloat);
    EK_REQUIRE(head_dim % 2 == 0 && head_dim <= 512, "q: expected an even head_dim up to 512, got ", head_dim);
    check("position_ids", position_ids, {batch, queries}, at::kLong);
    check("rope_table", rope_table, {kAny, head_dim}, at::kFloat);
    check("kv_cache", kv_cache, {2, kAny, kAny, kv_heads, head_dim}, kv_cache.scalar_type());
    check("page_table", page_table, {batch, kAny}, at::kInt);
    check("seq_lens", seq_lens, {batch}, at::kInt);
    EK_REQUIRE(row_offset >= 0, "row_offset: expected 0 or more, got ", row_offset);
    const eagle::RopeStoreKvArgs args{q.mutable_data_ptr<float>(), k.const_data_ptr<float>(), v.const_data_ptr<float>(), position_ids.const_data_ptr<int64_t>(), rope_table.const_data_ptr<float>(),
                                    kv_cache.mutable_data_ptr(), page_table.const_data_ptr<int32_t>(), seq_lens.const_data_ptr<int32_t>(), batch, queries, q.size(2), kv_heads, head_dim,
                                    rope_table.size(0), kv_cache.size(1), kv_cache.size(2), page_table.size(1), row_offset, {q.stride(0), q.stride(1), q.stride(2)},
                                    {k.stride(0), k.stride(1), k.stride(2)}, {v.stride(0), v.stride(1), v.stride(2)}, weight_dtype("kv_cache", kv_cache), threads()};
    launch([args] { eagle::kernels().rope_store_kv(args); }, {q, k, v, position_ids, rope_table, kv_cache, page_table, seq_lens});
}

void tree_attention(const Tensor& q, const Tensor& kv_cache, const Tensor& page_table, const Tensor& seq_lens, OptionalTensor mask, double scale, int64_t window, double soft_cap, Tensor out,
                    const std::optional<Tensor>& lse) {
    check_rows("q", q, {kAny, kAny, kAny, kAny}, at::kFloat);
    const int64_t batch = q.size(0), queries = q.size(1), q_heads = q.size(2), head_dim = q.size(3);
    check_rows("kv_cache", kv_cache, {2, kAny, kAny, kAny, head_dim}, kv_cache.scalar_type());
    const Dtype dtype = weight_dtype("kv_cache", kv_cache);
    const int64_t kv_heads = kv_cache.size(3);
    EK_REQUIRE(kv_heads > 0 && q_heads % kv_heads == 0, "q: expected a multiple of the cache's ", kv_heads, " heads, got ", q_heads);
    EK_REQUIRE(head_dim <= 512, "q: expected head_dim up to 512, got ", head_dim);
    check("page_table", page_table, {batch, kAny}, at::kInt);
    check("seq_lens", seq_lens, {batch}, at::kInt);
    check_optional("packed_ancestor_mask", mask, {batch, queries, kAny}, at::kLong);
    EK_REQUIRE(!mask.has_value() || (mask->size(2) >= 1 && mask->size(2) <= 4), "packed_ancestor_mask: expected 1 to 4 words, got ", mask->size(2));
    EK_REQUIRE(mask.has_value() || queries <= 256, "q: expected at most 256 queries in a causal chunk, got ", queries);
    EK_REQUIRE(window >= 0, "window: expected 0 (none) or more, got ", window);
    EK_REQUIRE(soft_cap >= 0, "soft_cap: expected 0 (none) or more, got ", soft_cap);
    check_rows("out", out, {batch, queries, q_heads, head_dim}, at::kFloat);
    check_optional("lse", lse, {batch, queries, q_heads}, at::kFloat);
    const eagle::TreeAttentionArgs args{q.const_data_ptr<float>(), kv_cache.const_data_ptr(), page_table.const_data_ptr<int32_t>(), seq_lens.const_data_ptr<int32_t>(), optional_ptr<int64_t>(mask),
                                     out.mutable_data_ptr<float>(), lse.has_value() ? lse->mutable_data_ptr<float>() : nullptr, batch, queries, q_heads, kv_heads, head_dim, kv_cache.size(2),
                                     page_table.size(1), mask.has_value() ? mask->size(2) : 0, window, {q.stride(0), q.stride(1), q.stride(2)}, {out.stride(0), out.stride(1), out.stride(2)},
                                     {kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), kv_cache.stride(3)}, static_cast<float>(scale), static_cast<float>(soft_cap), dtype, threads()};
    launch([args] { eagle::kernels().tree_attention(args); }, {q, kv_cache, page_table, seq_lens, mask.has_value() ? *mask : Tensor(), out, lse.has_value() ? *lse : Tensor()});
}

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
    if (choices.has_value()) {
        const int32_t* choice = choices->const_data_ptr<int32_t>();
        for (int64_t i = 0; i < next_size; ++i) EK_REQUIRE(choice[i] >= 0 && choice[i] < frontier * top_k, "choices: expected candidates below ", frontier * top_k, ", got ", choice[i]);
    }
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

void rerank(const Tensor& pool_tokens, const Tensor& pool_scores, const Tensor& pool_parents, const Tensor& root_tokens, const Tensor& seq_lens, OptionalTensor choices, Tensor tokens, Tensor parent,
            Tensor depth, Tensor mask, Tensor position_ids) {
    refuse_recording("rerank");
    check("pool.tokens", pool_tokens, {kAny, kAny}, at::kLong);
    const int64_t batch = pool_tokens.size(0), pool = pool_tokens.size(1), nodes = tokens.size(-1);
    check("pool.scores", pool_scores, {batch, pool}, at::kFloat);
    check("pool.parents", pool_parents, {batch, pool}, at::kInt);
    check("root_tokens", root_tokens, {batch}, at::kLong);
    check("seq_lens", seq_lens, {batch}, at::kInt);
    check_optional("choices", choices, {nodes - 1}, at::kInt);
    EK_REQUIRE(nodes >= 1 && nodes - 1 <= pool && nodes <= 256, "num_nodes: expected 1 to ", std::min<int64_t>(pool + 1, 256), ", got ", nodes);
    if (choices.has_value()) {
        const int32_t* choice = choices->const_data_ptr<int32_t>();
        for (int64_t i = 0; i + 1 < nodes; ++i)
            EK_REQUIRE(choice[i] >= 0 && choice[i] < pool && (i == 0 || choice[i] > choice[i - 1]), "choices: expected ascending pool indices below ", pool, ", got ", choice[i]);
    }
    const int64_t words = (nodes + 63) / 64;
    check("tokens", tokens, {batch, nodes}, at::kLong);
    check("parent", parent, {batch, nodes}, at::kInt);
    check("depth", depth, {batch, nodes}, at::kInt);
    check("packed_ancestor_mask", mask, {batch, nodes, words}, at::kLong);
    check("position_ids", position_ids, {batch, nodes}, at::kLong);
    const int64_t orphan = eagle::rerank({pool_tokens.const_data_ptr<int64_t>(), pool_scores.const_data_ptr<float>(), pool_parents.const_data_ptr<int32_t>(), root_tokens.const_data_ptr<int64_t>(),
                                          seq_lens.const_data_ptr<int32_t>(), optional_ptr<int32_t>(choices), tokens.mutable_data_ptr<int64_t>(), parent.mutable_data_ptr<int32_t>(),
                                          depth.mutable_data_ptr<int32_t>(), mask.mutable_data_ptr<int64_t>(), position_ids.mutable_data_ptr<int64_t>(), batch, pool, nodes, words});
    EK_REQUIRE(orphan < 0, "pool: entry ", orphan, " was selected without its parent; a child must not outrank its parent");
}

void accept(const Tensor& tokens, const Tensor& parent, const Tensor& sampled, const Tensor& active, Tensor accepted_nodes, Tensor num_accepted_drafts, Tensor bonus_token) {
    refuse_recording("accept");
    check("tokens", tokens, {kAny, kAny}, at::kLong);
    const int64_t batch = tokens.size(0), nodes = tokens.size(1);
    check("parent", parent, {batch, nodes}, at::kInt);
    check("sampled", sampled, {batch, nodes}, at::kLong);
    check("active", active, {batch}, at::kBool);
    check("accepted_nodes", accepted_nodes, {batch, kAny}, at::kInt);
    EK_REQUIRE(nodes >= 1 && accepted_nodes.size(1) >= 1, "tokens: expected at least the root");
    check("num_accepted_drafts", num_accepted_drafts, {batch}, at::kInt);
    check("bonus_token", bonus_token, {batch}, at::kLong);
    eagle::accept({tokens.const_data_ptr<int64_t>(), parent.const_data_ptr<int32_t>(), sampled.const_data_ptr<int64_t>(), active.const_data_ptr<bool>(), accepted_nodes.mutable_data_ptr<int32_t>(),
                   num_accepted_drafts.mutable_data_ptr<int32_t>(), bonus_token.mutable_data_ptr<int64_t>(), batch, nodes, accepted_nodes.size(1) - 1});
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
    check("kv_cache", kv_cache, {kAny, 2, kAny, kAny, kAny, kAny}, kv_cache.scalar_type());
    check("page_table", page_table, {kAny, kAny}, at::kInt);
    const int64_t batch = page_table.size(0);
    check("seq_lens", seq_lens, {batch}, at::kInt);
    check("accepted_nodes", accepted_nodes, {batch, kAny}, at::kInt);
    check("num_accepted_drafts", num_accepted_drafts, {batch}, at::kInt);
    eagle::compact({static_cast<char*>(kv_cache.mutable_data_ptr()), page_table.const_data_ptr<int32_t>(), seq_lens.const_data_ptr<int32_t>(), accepted_nodes.const_data_ptr<int32_t>(),
                    num_accepted_drafts.const_data_ptr<int32_t>(), kv_cache.size(0), kv_cache.size(2), kv_cache.size(3),
                    kv_cache.size(4) * kv_cache.size(5) * static_cast<int64_t>(kv_cache.element_size()), batch, page_table.size(1), accepted_nodes.size(1)});
}

}  // namespace

TORCH_LIBRARY(eagle_kernels, m) {
    m.def("linear(Tensor x, Tensor weight, Tensor? bias, int out_features, Tensor(a!) out) -> ()");
    m.def("expert_linear(Tensor x, Tensor weight, Tensor expert_ids, int out_features, Tensor(a!) out) -> ()");
    m.def("embedding(Tensor ids, Tensor weight, int out_features, Tensor(a!) out) -> ()");
    m.def("rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!)? residual, Tensor(b!) out) -> ()");
    m.def("silu_mul(Tensor gate_up, Tensor(a!) out) -> ()");
    m.def("route_experts(Tensor router_logits, bool normalize, Tensor(a!) weights, Tensor(b!) expert_ids) -> ()");
    m.def("rope_store_kv(Tensor(a!) q, Tensor k, Tensor v, Tensor position_ids, Tensor rope_table, Tensor(b!) kv_cache, Tensor page_table, Tensor seq_lens, int row_offset) -> ()");
    m.def("tree_attention(Tensor q, Tensor kv_cache, Tensor page_table, Tensor seq_lens, Tensor? packed_ancestor_mask, float scale, int window, float soft_cap, Tensor(a!) out, Tensor(b!)? lse) -> ()");
    m.def("sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor positions, bool min_p_first, Tensor? logit_bias, Tensor? repetition_penalty, "
          "Tensor? presence_penalty, Tensor? frequency_penalty, Tensor? prompt_mask, Tensor? output_counts, Tensor(a!) out, Tensor(b!)? log_probs) -> ()");
    m.def("filter_probs(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, bool min_p_first, Tensor(a!) out) -> ()");
    m.def("draw_children(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor positions, int lanes, bool min_p_first, Tensor(a!) out) -> ()");
    m.def("noise(Tensor seeds, Tensor positions, int stream, bool uniform, Tensor(a!) out) -> ()");
    m.def("expand(Tensor logits, Tensor frontier_scores, Tensor frontier_pool_index, Tensor features, Tensor frontier_mask, Tensor(a!) pool_tokens, Tensor(b!) pool_scores, Tensor(c!) pool_parents, "
          "int pool_offset, int top_k, int first_row, Tensor? draft_to_target, Tensor? choices, Tensor(d!) tokens, Tensor(e!) scores, Tensor(f!) pool_index, Tensor(g!) next_features, "
          "Tensor(h!) next_mask) -> ()");
    m.def("rerank(Tensor pool_tokens, Tensor pool_scores, Tensor pool_parents, Tensor root_tokens, Tensor seq_lens, Tensor? choices, Tensor(a!) tokens, Tensor(b!) parent, Tensor(c!) depth, "
          "Tensor(d!) packed_ancestor_mask, Tensor(e!) position_ids) -> ()");
    m.def("accept(Tensor tokens, Tensor parent, Tensor sampled, Tensor active, Tensor(a!) accepted_nodes, Tensor(b!) num_accepted_drafts, Tensor(c!) bonus_token) -> ()");
    m.def("accept_rejection(Tensor tokens, Tensor parent, Tensor target_probs, Tensor draft_probs, Tensor seeds, Tensor positions, Tensor active, Tensor(a!) accepted_nodes, "
          "Tensor(b!) num_accepted_drafts, Tensor(c!) bonus_token) -> ()");
    m.def("compact(Tensor(a!) kv_cache, Tensor page_table, Tensor seq_lens, Tensor accepted_nodes, Tensor num_accepted_drafts) -> ()");
}

TORCH_LIBRARY_IMPL(eagle_kernels, CPU, m) {
    m.impl("linear", &linear);
    m.impl("expert_linear", &expert_linear);
    m.impl("embedding", &embedding);
    m.impl("rms_norm", &rms_norm);
    m.impl("silu_mul", &silu_mul);
    m.impl("route_experts", &route_experts);
    m.impl("rope_store_kv", &rope_store_kv);
    m.impl("tree_attention", &tree_attention);
    m.impl("sample", &sample);
    m.impl("filter_probs", &filter_probs);
    m.impl("draw_children", &draw_children);
    m.impl("noise", &noise);
    m.impl("expand", &expand);
    m.impl("rerank", &rerank);
    m.impl("accept", &accept);
    m.impl("accept_rejection", &accept_rejection);
    m.impl("compact", &compact);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    pybind11::class_<Recording>(m, "Recording")
        .def(pybind11::init<>())
        .def("begin", [](Recording& self) {
            TORCH_CHECK(recording == nullptr, "a recording is open already");
            recording = &self;
        })
        .def("end", [](Recording&) { recording = nullptr; })
        .def("replay", [](const Recording& self) {
            for (const auto& call : self.calls) call();
        }, pybind11::call_guard<pybind11::gil_scoped_release>())
        .def_property_readonly("num_calls", [](const Recording& self) { return self.calls.size(); });
    m.def("isa", [] { return std::string(eagle::kernels().name); }, "Instruction set of the CPU kernels in use.");
    m.def("set_isa", [](const std::string& name) {
        if (!eagle::set_isa(name.c_str())) throw pybind11::value_error("isa: expected one of those of available_isas(), got '" + name + "'");
    });
    m.def("available_isas", [] {
        std::vector<std::string> names;
        for (const char* name : {"portable", "avx2", "avx512"})
            if (eagle::isa_available(name)) names.push_back(name);
        return names;
    });
}
