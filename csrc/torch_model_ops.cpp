// The ops of a decoder layer.
#include "cpu/copy_rows.h"
#include "cpu/kernels.h"
#include "torch_checks.h"

namespace {

using namespace eagle::torch_api;

// The CPU is always deterministic.
void linear(const Tensor& x, const Tensor& weight, OptionalTensor bias, int64_t out_features, bool /*deterministic*/, Tensor out) {
    check_packed("x", x, weight, out_features, false);
    check_optional("bias", bias, {out_features}, at::kFloat);
    check_rows("out", out, {x.size(0), out_features}, at::kFloat);
    const eagle::LinearArgs args{x.const_data_ptr<float>(), weight.const_data_ptr(), optional_ptr<float>(bias), nullptr, out.mutable_data_ptr<float>(), x.size(0), x.size(1), out_features,
                             x.stride(0), out.stride(0), 1, weight_dtype("weight", weight), threads()};
    launch([args] { eagle::kernels().linear(args); }, {x, weight, bias.has_value() ? *bias : Tensor(), out});
}

void expert_linear(const Tensor& x, const Tensor& weight, const Tensor& expert_ids, int64_t out_features, Tensor out) {
    refuse_recording("expert_linear");
    check_packed("x", x, weight, out_features, true);
    const Dtype dtype = weight_dtype("weight", weight);
    check("expert_ids", expert_ids, {x.size(0)}, at::kInt);
    check_rows("out", out, {x.size(0), out_features}, at::kFloat);
    eagle::kernels().linear({x.const_data_ptr<float>(), weight.const_data_ptr(), nullptr, expert_ids.const_data_ptr<int32_t>(), out.mutable_data_ptr<float>(), x.size(0), x.size(1),
                             out_features, x.stride(0), out.stride(0), weight.size(0), dtype, threads()});
}

void embedding(const Tensor& ids, const Tensor& weight, int64_t out_features, Tensor out) {
    check("ids", ids, {kAny}, at::kLong);
    check("out", out, {ids.size(0), kAny}, at::kFloat);
    check_packed("out", out, weight, out_features, false);
    const int64_t* id = ids.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < ids.size(0); ++i) EK_REQUIRE(id[i] < out_features, "ids: expected token ids below ", out_features, ", got ", id[i]);
    const eagle::EmbeddingArgs args{id, weight.const_data_ptr(), out.mutable_data_ptr<float>(), ids.size(0), out.size(1), out_features, weight_dtype("weight", weight), threads()};
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

void copy_rows(const Tensor& x, Tensor out) {
    check_rows("x", x, {kAny, kAny}, x.scalar_type());
    check_rows("out", out, {x.size(0), x.size(1)}, x.scalar_type());
    const int64_t item = x.element_size();
    const eagle::CopyRowsArgs args{static_cast<const char*>(x.const_data_ptr()), static_cast<char*>(out.mutable_data_ptr()), x.size(0), x.size(1) * item, x.stride(0) * item, out.stride(0) * item};
    launch([args] { eagle::copy_rows(args); }, {x, out});
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

void tree_attention(const Tensor& q, const Tensor& kv_cache, const Tensor& page_table, const Tensor& seq_lens, OptionalTensor mask, double scale, int64_t window, double soft_cap, bool /*deterministic*/, Tensor out,
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

}  // namespace

TORCH_LIBRARY_IMPL(eagle_kernels, CPU, m) {
    m.impl("linear", &linear);
    m.impl("expert_linear", &expert_linear);
    m.impl("embedding", &embedding);
    m.impl("rms_norm", &rms_norm);
    m.impl("copy_rows", &copy_rows);
    m.impl("silu_mul", &silu_mul);
    m.impl("route_experts", &route_experts);
    m.impl("rope_store_kv", &rope_store_kv);
    m.impl("tree_attention", &tree_attention);
}
