#!/usr/bin/env bash
# Everything that needs a GPU, in under ten minutes: facts and ceilings, build, tests, sanitizer, benchmarks, the demo pair. One JSON and one table at the end.
#
#     bench/gpu_check.sh                     all sections
#     bench/gpu_check.sh facts opbench       these sections
#
# Goes on after a failure; exit status 1 if any section failed, 2 for a wrong name or without a GPU. Environment:
#     PYTHON      interpreter with a CUDA torch and Triton (default: python, or python3)
#     OUT         folder of the results (default: bench/results/<date>-<gpu>)
#     WHEELS      folder of wheels for packages that are missing, when there is no network; the message says which, and how to fill the folder
#     DEMO_PARTS  folder of the demo target in parts (bench/demo_parts.py split); without it and without the target in EAGLE_CACHE a random pair stands in, and the table says so
#     JOBS        processes of tests that run at once (default: one less than there are cores, at most 14)
set -u

# What the caller names by a relative path lies where the caller is.
for name in OUT WHEELS DEMO_PARTS PYTHON; do
    [[ $name == PYTHON && ${PYTHON:-} != */* ]] && continue
    [ -n "${!name:-}" ] && export "$name=$(realpath -ms "${!name}")"
done
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SCRIPT="$ROOT/bench/$(basename "${BASH_SOURCE[0]}")"
cd "$ROOT" || exit 2

SECTIONS=(facts build optests graphs bitwise sanitizer opbench stepbench demo)
declare -A LIMITS=([facts]=35 [build]=110 [optests]=110 [graphs]=50 [bitwise]=45 [sanitizer]=50 [opbench]=85 [stepbench]=65 [demo]=40) # seconds, 590 together
NOT_RUN=77 # exit status of a section that could not run here: neither passed nor failed

export PYTHON=${PYTHON:-$(command -v python || command -v python3)}
export SITE="$ROOT/build/gpu_check_packages"
export PYTHONPATH="$ROOT:$ROOT/tests:$SITE${PYTHONPATH:+:$PYTHONPATH}"
export TRITON_INTERPRET=0
export JOBS=${JOBS:-$(($(nproc) > 15 ? 14 : $(nproc) > 2 ? $(nproc) - 1 : 1))}
export MAX_JOBS=${MAX_JOBS:-$(nproc)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}

note() { # a remark of a section for the table
    echo "$2" >"$OUT/$1.note"
    echo "$2"
}

# Files of tests, each in a process of its own, FILE@N in N processes, JOBS at once: most of their time is compiling kernels. $1: section, $2: which marks, then files.
run_tests() {
    local section=$1 marks=$2 file i shards
    shift 2
    for file in "$@"; do
        shards=1
        [[ $file == *@* ]] && shards=${file#*@}
        for ((i = 1; i <= shards; i++)); do printf '%s\0' "${file%@*}" "$i/$shards" "$section-$(basename "${file%@*}" .py)-$i"; done
    done | xargs -0 -P "$JOBS" -n 3 bash -c '
        "$PYTHON" -m pytest -q -m "$1" --shard="$3" --junitxml="$OUT/$4.xml" "$2" >"$OUT/$4.log" 2>&1
        status=$?
        echo "== $2, part $3: exit status $status"
        [ $status = 0 ] || tail -n 40 "$OUT/$4.log"
        [ $status = 0 ]' _ "$marks"
}

facts() { "$PYTHON" bench/gpu_facts.py --output "$OUT/facts.json"; }

build() {
    local missing
    missing=$("$PYTHON" bench/gpu_facts.py --missing) || return 1
    if [ -n "$missing" ] && [ -n "${WHEELS:-}" ]; then
        # --no-deps: the list holds what they need too, and the machine's own torch and numpy stay.
        # shellcheck disable=SC2086
        "$PYTHON" -m pip install --quiet --no-index --no-deps --find-links "$WHEELS" --target "$SITE" --upgrade $missing || return 1
        missing=$("$PYTHON" bench/gpu_facts.py --missing) || return 1
    fi
    if [ -n "$missing" ]; then
        note build "missing packages: $(echo $missing)"
        echo "Install them:  $PYTHON -m pip install" $missing
        echo "Without a network, fill a folder elsewhere and give it as WHEELS:  pip download --only-binary :all: --platform manylinux2014_x86_64" \
            "--python-version $("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])') --no-deps --dest FOLDER" $missing
        return 1
    fi
    FORCE_CUDA=1 "$PYTHON" setup.py build_ext --inplace || return 1
    "$PYTHON" bench/sanitizer_driver.py --check-build
}

optests() {
    # The slowest first. What has no line of its own is in one process.
    local file files=(tests/test_triton_tree_attention.py@6 tests/test_triton_sample.py@5 tests/test_triton_linear.py@2 tests/test_triton_layer.py@2)
    for file in tests/test_triton_*.py tests/test_cuda_ops.py; do
        [[ " ${files[*]} " == *" $file@"* ]] || files+=("$file")
    done
    run_tests optests "not slow" "${files[@]}"
}

graphs() { run_tests graphs gpu tests/test_gpu_graphs.py@3; }

bitwise() { run_tests bitwise gpu tests/test_gpu_bitwise.py@8; }

sanitizer() {
    local tool pids=() failed=0
    if ! command -v compute-sanitizer >/dev/null; then
        note sanitizer "compute-sanitizer is not installed"
        return $NOT_RUN
    fi
    # Without the caching allocator every tensor has bounds of its own.
    for tool in memcheck racecheck; do
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 9 --log-file "$OUT/sanitizer-$tool.txt" "$PYTHON" bench/sanitizer_driver.py --device cuda &
        pids+=($!)
    done
    for tool in "${pids[@]}"; do wait "$tool" || failed=1; done
    tail -n 20 "$OUT"/sanitizer-*.txt
    return $failed
}

opbench() { "$PYTHON" bench/all_ops.py --device cuda --rounds 9 --only llama-3.1-8b --output "$OUT/ops.json"; }

stepbench() {
    local status=0
    "$PYTHON" bench/bench_step.py --device cuda --output "$OUT/step.json" || status=1
    "$PYTHON" bench/bench_step.py --device cuda --deterministic --output "$OUT/step-deterministic.json" || status=1
    return $status
}

demo() {
    if [ -n "${DEMO_PARTS:-}" ]; then
        "$PYTHON" bench/demo_parts.py join "$DEMO_PARTS" || return 1
    fi
    if "$PYTHON" bench/demo_parts.py where; then
        "$PYTHON" -m eagle_engine.cli verify --suite mt_bench --limit 4 --max-new-tokens 64 --device cuda --deterministic || return 1
        note demo "SmolLM2-135M-Instruct and its drafter"
    else
        note demo "a random pair: the demo target is not here (DEMO_PARTS)"
        "$PYTHON" bench/verify_random.py --device cuda || return 1
    fi
}

run_section() {
    local name=$1 status started=$EPOCHREALTIME word
    rm -f "$OUT/$name.note" "$OUT/$name"-*.xml
    timeout --kill-after=5 "${LIMITS[$name]}" bash "$SCRIPT" --only-section "$name" >"$OUT/$name.log" 2>&1
    status=$?
    case $status in
    0) word=passed ;;
    "$NOT_RUN") word=not-run ;;
    124 | 137) word=timed-out ;;
    *) word=failed ;;
    esac
    printf '%s\t%s\t%s\t%s\t%s\n' "$name" "$word" "$status" "$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $started }")" "${LIMITS[$name]}" >>"$OUT/sections.tsv"
    echo "$name: $word"
}

known() {
    local name
    for name in "${SECTIONS[@]}"; do [ "$name" = "$1" ] && return 0; done
    return 1
}

if [ "${1:-}" = --only-section ]; then
    "$2"
    exit
fi

[ $# -gt 0 ] || set -- "${SECTIONS[@]}"
for name in "$@"; do
    if ! known "$name"; then
        echo "gpu_check: expected sections out of ${SECTIONS[*]}, got $name" >&2
        exit 2
    fi
done
if ! gpu=$("$PYTHON" bench/gpu_facts.py --name); then
    echo "gpu_check: nothing was checked" >&2
    exit 2
fi
export OUT=${OUT:-$ROOT/bench/results/$(date +%Y-%m-%d)-$gpu}
mkdir -p "$OUT" || exit 2
OUT=$(cd "$OUT" && pwd)
for name in "$@"; do run_section "$name"; done
"$PYTHON" bench/gpu_report.py "$OUT"
