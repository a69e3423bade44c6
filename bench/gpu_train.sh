#!/usr/bin/env bash
# Train the shipped drafters on a GPU that is at hand for minutes at a time: every call goes on where the last one stopped, and leaves the newest drafters and figures in OUT.
#
#     DATA="answers.npz prompts.jsonl.gz" bench/gpu_train.sh             both drafters, EAGLE-3 first
#     DATA=... MINUTES=8 bench/gpu_train.sh eagle1                       one of them, for eight minutes
#
# Exit status 0 when all that was asked for is trained to its end, 3 when another call is needed, 1 after a failure, 2 for a wrong name or without a GPU. Environment:
#     DATA        files of conversations or prompts, as `eagle train --data` takes them; needed by the first call only
#     MINUTES     of training and answering in this call, all drafters together (default: 8)
#     OUT         folder for what is to be kept (default: bench/results/train-<gpu>); at most 40 MB
#     RUNS        folder of the runs, several GB, kept between calls (default: build/gpu_train)
#     PYTHON, WHEELS, DEMO_PARTS   as for bench/gpu_check.sh, whose section build makes the extension
set -u

for name in OUT RUNS WHEELS DEMO_PARTS PYTHON; do
    [[ $name == PYTHON && ${PYTHON:-} != */* ]] && continue
    [ -n "${!name:-}" ] && export "$name=$(realpath -ms "${!name}")"
done
DATA=$(for file in ${DATA:-}; do realpath -ms "$file"; done)
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

export PYTHON=${PYTHON:-$(command -v python || command -v python3)}
SITE="$PWD/build/gpu_check_packages"
export PYTHONPATH="$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}"
RUNS=${RUNS:-$PWD/build/gpu_train}
MINUTES=${MINUTES:-8}

gpu=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "-") if torch.cuda.is_available() else "")') || exit 2
[ -n "$gpu" ] || { echo "gpu_train: torch finds no GPU" >&2; exit 2; }
OUT=${OUT:-$PWD/bench/results/train-$gpu}
mkdir -p "$OUT" "$RUNS"

"$PYTHON" -c 'import accelerate, tensorboard, matplotlib' 2>/dev/null || {
    [ -n "${WHEELS:-}" ] && "$PYTHON" -m pip install --quiet --no-index --find-links "$WHEELS" --target "$SITE" --upgrade accelerate tensorboard matplotlib
} || { echo "gpu_train: needs the extra 'train' (accelerate, tensorboard, matplotlib); without a network, fill a folder with their wheels and give it as WHEELS" >&2; exit 1; }
"$PYTHON" -c 'import eagle_kernels' || { FORCE_CUDA=1 "$PYTHON" setup.py build_ext --inplace || exit 1; }
if [ -n "${DEMO_PARTS:-}" ]; then "$PYTHON" bench/demo_parts.py join "$DEMO_PARTS" || exit 1; fi
"$PYTHON" bench/demo_parts.py where || { echo "gpu_train: the demo target is not here (DEMO_PARTS, or EAGLE_CACHE)" >&2; exit 1; }

# A GPU does in a minute what two CPU cores do in an hour, so these runs are longer than the ones the shipped drafters came from.
common=(--target demo --device cuda --precision bfloat16 --max-length 512 --draft-vocab-size 8192 --unroll-steps 5 --batch-size 16 --epochs 20 --learning-rate 1e-3 --warmup-steps 300
    --num-prompts 40000 --max-new-tokens 256 --answer-batch-size 256 --states-directory "$RUNS/states" --checkpoint-steps 500 --evaluate-steps 500)
train_eagle3() { train eagle3 --version 3 --intermediate-size 1024 --export-dtype float8_e4m3fn "$@"; }
train_eagle1() { train eagle1 --version 1 --token-loss-weight 1 --feature-loss-weight 0.5 --unroll-decay 0.8 "$@"; }

train() { # name, options
    local name=$1 status
    shift
    mkdir -p "$RUNS/$name"
    # Both runs learn from the same answers.
    [ "$name" = eagle1 ] && [ -f "$RUNS/eagle3/data.npz" ] && [ ! -f "$RUNS/eagle1/data.npz" ] && cp "$RUNS/eagle3/data.npz" "$RUNS/eagle3/left_out.json" "$RUNS/eagle1/"
    # shellcheck disable=SC2086
    timeout --signal=TERM --kill-after=30 $((minutes_each * 60 + 60)) "$PYTHON" -m eagle_engine.cli train --out "$RUNS/$name" --data $DATA --stop-after-minutes "$minutes_each" "${common[@]}" "$@"
    status=$?
    mkdir -p "$OUT/$name"
    cp "$RUNS/$name"/{config.json,metrics.jsonl,left_out.json} "$OUT/$name/" 2>/dev/null
    [ -d "$RUNS/$name/drafter" ] && cp -r "$RUNS/$name/drafter" "$OUT/$name/"
    return $status
}

names=("${@:-eagle3}")
[ $# = 0 ] && names=(eagle3 eagle1)
minutes_each=$((MINUTES / ${#names[@]}))
[ "$minutes_each" -ge 1 ] || { echo "gpu_train: MINUTES=$MINUTES is less than a minute for each of ${names[*]}" >&2; exit 2; }
worst=0
for name in "${names[@]}"; do
    [[ $name == eagle1 || $name == eagle3 ]] || { echo "gpu_train: unknown drafter $name; known are eagle3 and eagle1" >&2; exit 2; }
    "train_$name"
    case $? in
    0) echo "gpu_train: $name is trained" ;;
    3) echo "gpu_train: $name goes on with the next call" && [ $worst = 0 ] && worst=3 ;;
    124 | 137) echo "gpu_train: $name was still answering prompts or taking states; it goes on with the next call" && [ $worst = 0 ] && worst=3 ;;
    *) worst=1 ;;
    esac
done
exit $worst
