#!/usr/bin/env bash
# Train the shipped drafters on a GPU that is at hand for minutes at a time: every call goes on where the last one stopped, and leaves the newest drafters and figures in OUT.
#
#     DATA="answers.npz prompts.jsonl.gz" bench/gpu_train.sh             both drafters, EAGLE-3 first
#     DATA=... MINUTES=8 bench/gpu_train.sh eagle1                       one of them, for eight minutes
#
# Exit status 0 when all that was asked for is trained to its end, 3 when another call is needed, 1 after a failure, 2 for a wrong name or without a GPU. Environment:
#     DATA        files of conversations or prompts, as `eagle train --data` takes them; needed by the first call only
#     MINUTES     of this call, building and answering included (default: 8); a drafter in hand is given half a minute more to end
#     OUT         folder for what is to be kept (default: bench/results/train-<gpu>); at most 40 MB
#     RUNS        folder of the runs, several GB, kept between calls (default: build/gpu_train)
#     PYTHON, WHEELS, DEMO_PARTS   as for bench/gpu_check.sh; training needs more packages, and the message names those that are missing
set -u

for name in OUT RUNS WHEELS DEMO_PARTS PYTHON; do
    [[ $name == PYTHON && ${PYTHON:-} != */* ]] && continue
    [ -n "${!name:-}" ] && export "$name=$(realpath -ms "${!name}")"
done
DATA=$(for file in ${DATA:-}; do realpath -ms "$file"; done)
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

names=("$@")
[ $# = 0 ] && names=(eagle3 eagle1)
for name in "${names[@]}"; do
    [[ $name == eagle1 || $name == eagle3 ]] || { echo "gpu_train: unknown drafter $name; known are eagle3 and eagle1" >&2; exit 2; }
done
export PYTHON=${PYTHON:-$(command -v python || command -v python3)}
SITE="$PWD/build/gpu_check_packages"
export PYTHONPATH="$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}"
RUNS=${RUNS:-$PWD/build/gpu_train}
MINUTES=${MINUTES:-8}

gpu=$("$PYTHON" bench/gpu_facts.py --name) || { echo "gpu_train: torch finds no GPU" >&2; exit 2; }
OUT=${OUT:-$PWD/bench/results/train-$gpu}
mkdir -p "$OUT" "$RUNS"

missing=$("$PYTHON" bench/gpu_facts.py --missing --training) || exit 1
if [ -n "$missing" ] && [ -n "${WHEELS:-}" ]; then
    # --no-deps: the list holds what they need too, and the machine's own torch and numpy stay.
    # shellcheck disable=SC2086
    "$PYTHON" -m pip install --quiet --no-index --no-deps --find-links "$WHEELS" --target "$SITE" --upgrade $missing || exit 1
    missing=$("$PYTHON" bench/gpu_facts.py --missing --training) || exit 1
fi
[ -z "$missing" ] || { echo "gpu_train: missing packages:" $missing >&2; echo "Without a network, fill a folder with their wheels and give it as WHEELS (see bench/gpu_check.sh)" >&2; exit 1; }
"$PYTHON" -c 'import eagle_kernels' || { FORCE_CUDA=1 "$PYTHON" setup.py build_ext --inplace || exit 1; }
if [ -n "${DEMO_PARTS:-}" ]; then "$PYTHON" bench/demo_parts.py join "$DEMO_PARTS" || exit 1; fi
"$PYTHON" bench/demo_parts.py where || { echo "gpu_train: the demo target is not here (DEMO_PARTS, or EAGLE_CACHE)" >&2; exit 1; }

# A GPU does in a minute what two CPU cores do in an hour, so these runs are longer than the ones the shipped drafters came from.
common=(--target demo --device cuda --precision bfloat16 --max-length 512 --draft-vocab-size 8192 --unroll-steps 5 --batch-size 16 --epochs 20 --learning-rate 1e-3 --warmup-steps 300
    --num-prompts 40000 --max-new-tokens 256 --answer-batch-size 256 --checkpoint-steps 500 --evaluate-steps 500)
train_eagle3() { train eagle3 --version 3 --intermediate-size 1024 --export-dtype float8_e4m3fn; }
train_eagle1() { train eagle1 --version 1 --token-loss-weight 1 --feature-loss-weight 0.5 --unroll-decay 0.8; }

share_data() { # name: both runs learn from the same answers, and EAGLE-1/2 from states that EAGLE-3 has; which ones to use is written to `states`
    local name=$1 other=eagle3
    [ "$name" = eagle3 ] && other=eagle1
    if [ -f "$RUNS/$other/data.npz" ] && [ ! -f "$RUNS/$name/data.npz" ]; then
        cp "$RUNS/$other/left_out.json" "$RUNS/$name/"
        cp "$RUNS/$other/data.npz" "$RUNS/$name/data.partial" && mv "$RUNS/$name/data.partial" "$RUNS/$name/data.npz"
    fi
    states="$RUNS/$name/states"
    [ "$name" = eagle1 ] && [ -f "$RUNS/eagle3/states/states.json" ] && cmp -s "$RUNS/eagle3/data.npz" "$RUNS/eagle1/data.npz" && states="$RUNS/eagle3/states"
}

train() { # name, options
    local name=$1 status states data=()
    shift
    mkdir -p "$RUNS/$name" "$OUT/$name"
    share_data "$name"
    [ -n "$DATA" ] && mapfile -t data <<<"$DATA" && data=(--data "${data[@]}")
    # Beside the time of training itself there is that of answering, of states and of the report.
    timeout --signal=TERM --kill-after=30 $((seconds + 30)) "$PYTHON" -m eagle_engine.cli train --out "$RUNS/$name" ${data[@]+"${data[@]}"} \
        --states-directory "$states" --stop-after-minutes "$((seconds / 60)).$(((seconds % 60) * 10 / 60))" "${common[@]}" "$@"
    status=$?
    cp "$RUNS/$name"/{config.json,metrics.jsonl,left_out.json} "$OUT/$name/" 2>/dev/null
    [ -d "$RUNS/$name/drafter" ] && cp -r "$RUNS/$name/drafter" "$OUT/$name/"
    return $status
}

worst=0
left=${#names[@]}
for name in "${names[@]}"; do
    if [ -f "$RUNS/$name/trained" ]; then
        echo "gpu_train: $name was trained by an earlier call"
        left=$((left - 1))
        continue
    fi
    # What is left of the call, in equal shares.
    seconds=$(((MINUTES * 60 - SECONDS) / left))
    left=$((left - 1))
    # The second run starts from the answers of the first: while there are none yet, the first has all the time.
    first="$RUNS/${names[0]}/data.npz"
    if [ $left -gt 0 ] && [ ! -f "$first" ]; then
        seconds=$((seconds * (left + 1)))
    fi
    if [ $seconds -lt 30 ] || { [ "$name" != "${names[0]}" ] && [ ! -f "$first" ]; }; then
        echo "gpu_train: $name has to wait for the next call"
        [ $worst = 0 ] && worst=3
        continue
    fi
    "train_$name"
    case $? in
    0) echo "gpu_train: $name is trained" && touch "$RUNS/$name/trained" ;;
    3 | 124 | 137) echo "gpu_train: $name goes on with the next call" && [ $worst = 0 ] && worst=3 ;;
    *) worst=1 ;;
    esac
done
exit $worst
