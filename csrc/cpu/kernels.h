// The kernels that exist once per instruction set, and the choice among them.
#pragma once

#include "expand.h"
#include "linear.h"
#include "noise.h"
#include "rms_norm.h"
#include "rope_store_kv.h"
#include "route_experts.h"
#include "sample.h"
#include "silu_mul.h"
#include "topk.h"
#include "tree_attention.h"

namespace eagle {

struct Kernels {
    const char* name;
    void (*linear)(const LinearArgs&);
    void (*embedding)(const EmbeddingArgs&);
    void (*rms_norm)(const RmsNormArgs&);
    void (*rope_store_kv)(const RopeStoreKvArgs&);
    void (*silu_mul)(const SiluMulArgs&);
    void (*route_experts)(const RouteExpertsArgs&);
    void (*tree_attention)(const TreeAttentionArgs&);
    void (*expand)(const ExpandArgs&);
    void (*sample)(const SampleArgs&);
    void (*noise)(const NoiseArgs&);
    void (*accept_rejection)(const AcceptRejectionArgs&);
    void (*logits_topk)(const LogitsTopkArgs&);
    void (*head_topk)(const HeadTopkArgs&);
};

extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Kernels kernels_amx;
#endif

// The kernels of the best instruction set of this processor, or those chosen by set_isa.
const Kernels& kernels();
// False when the name is unknown or the processor lacks the instructions.
bool set_isa(const char* name);
bool isa_available(const char* name);

}  // namespace eagle
