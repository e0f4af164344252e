#!/usr/bin/env bash
# Everything that needs a GPU, in one go: benchmarks/gpu.sh OUT_DIR [build] [test] [sanitize] [bench] [train] [compare]
# Uses the python3 on PATH, whose torch and jax are taken as they are. RECIPES: which to train and compare; all without it.
# TESTS: further arguments of pytest, such as "-m slow" for the long sweeps.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: benchmarks/gpu.sh OUT_DIR [build] [test] [sanitize] [bench] [train] [compare]}
shift
phases=${*:-build test sanitize bench train compare}
recipes=${RECIPES:-fp8-delayed fp8-current fp8-block mxfp8 mxfp8-2d nvfp4}
mkdir -p "$out"
# One thread to compile with: the test workers are many.
export PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false TORCHINDUCTOR_COMPILE_THREADS=1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
status=0

join() { # waits for every step in the background
  local pid
  for pid in $(jobs -p); do wait "$pid" || status=1; done
}

step() { # step NAME SECONDS COMMAND...: runs it, keeps its log, says how it ended; at its limit pytest still sums up
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  timeout --foreground -s INT -k 30 "$limit" "$@" >"$out/$name.log" 2>&1
  local rc=$?
  [ $rc -eq 0 ] || status=1
  echo "== $name: exit $rc after $((SECONDS - start)) s"
  tail -n "${TAIL:-6}" "$out/$name.log"
  return $rc
}

for phase in $phases; do
  case $phase in
    build) step build 400 env DIPTYCH_CUDA=on python3 -m pip install -q --no-build-isolation --no-deps -e . ;;
    test) step test 540 python3 -m pytest -q -n "${WORKERS:-8}" -p no:cacheprovider ${TESTS:-} ;;
    sanitize)
      # Our kernels alone are instrumented. racecheck faults inside cuBLASLt's kernels, so it gets ours only.
      step sanitize-memcheck 200 compute-sanitizer --tool memcheck --error-exitcode 9 --kernel-name kns=diptych \
        python3 -m pytest -q -m "sanitize and cuda" -p no:cacheprovider tests/core
      step sanitize-racecheck 200 compute-sanitizer --tool racecheck --error-exitcode 9 --kernel-name kns=diptych \
        python3 -m pytest -q -m "sanitize and cuda" -k "not theirs" -p no:cacheprovider tests/core
      ;;
    bench)
      # Writes suite.json; BENCH holds further arguments, such as --quick, --only SECTION or --library FILE.
      TORCHINDUCTOR_COMPILE_THREADS=8 TAIL=200 step bench "${SECONDS_OF_BENCH:-1200}" python3 -m benchmarks --out "$out" ${BENCH:-}
      ;;
    train) # all at once: what is asked is the loss, not the time
      for framework in torch jax; do
        for recipe in $recipes; do
          step "train-$framework-$recipe" 300 diptych train --framework $framework --recipe $recipe --device cuda \
            --steps 300 --overwrite --out "$scratch/train-$framework-$recipe" &
        done
      done
      join
      ;;
    compare)
      for recipe in $recipes; do
        step "compare-$recipe" 400 diptych compare --recipe $recipe --device cuda --out "$scratch/compare-$recipe" &
      done
      join
      ;;
    *) echo "unknown phase $phase" >&2; exit 2 ;;
  esac
done
exit $status
