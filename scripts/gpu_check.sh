#!/usr/bin/env bash
# One run on a machine with a CUDA GPU and no network: tests, then measurements, within 6 minutes.
# usage: scripts/gpu_check.sh   (after scripts/gpu_pack.py where there is a network)
#
# Everything goes to ${OUT:-gpu-results}: DATE-DEVICE.json (scripts/gpu_bench.py says what is in it),
# the same as table.md, and logs; each as soon as it is known. Packages are installed into a
# temporary directory. Exit status: 0 if all tests passed and something was measured, else 1.
#
#   PYTHON               the interpreter that has torch, python3 if not set
#   GPU_CHECK_S          seconds for all of it, 350
#   GPU_CHECK_TESTS_S    of them at most for the tests, 140
#   GPU_CHECK_WORKERS    processes that run tests, 8
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} out=${OUT:-gpu-results} pack=.gpu-check
total_s=${GPU_CHECK_S:-350} tests_s=${GPU_CHECK_TESTS_S:-140} workers=${GPU_CHECK_WORKERS:-8}
reserve_s=8 most_starts=6

name=$("$python" - 2>/dev/null <<'PYTHON'
import datetime, re, sys, torch
if not torch.cuda.is_available():
    sys.exit(1)
device = re.sub("[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
print(f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}-{device}")
PYTHON
) || {
  echo "Error: $python finds no CUDA device with its torch; nothing was run." >&2
  exit 1
}
if [ ! -d $pack/base ]; then
  echo "Error: $pack/base is missing; scripts/gpu_pack.py makes it." >&2
  exit 1
fi
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
result=$out/$name.json log=$out/check.log results=$out/tests.jsonl
rm -f "$result" "$results" "$out/bench.log" "$log"

# Models are made in memory if there is room for 50 GiB of them.
work=$(mktemp -d) models=$work/models making=
[ "$(df --output=avail -k /dev/shm 2>/dev/null | tail -1)" -gt 52428800 ] 2>/dev/null &&
  models=$(mktemp -d -p /dev/shm)
trap '[ -z "$making" ] || kill "$making" 2>/dev/null; rm -rf "$work" "$models"' EXIT
mkdir -p "$models"

say() { echo "[$SECONDS s] $*" | tee -a "$log"; }

install() { # wheels, what is copied as it is, and that qinfer is there under this version
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
    --disable-pip-version-check --target "$work/site" $pack/base/wheels/*.whl >>"$log" 2>&1
  cp -r $pack/base/site/. "$work/site/"
  local version
  version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
  mkdir -p "$work/site/qinfer-$version.dist-info"
  printf 'Metadata-Version: 2.1\nName: qinfer\nVersion: %s\n' "$version" \
    >"$work/site/qinfer-$version.dist-info/METADATA"
  export PYTHONPATH=$work/site:$PWD:$PWD/cli:$PWD/converters:$PWD/scripts PYTHONUNBUFFERED=1
  export HF_HUB_OFFLINE=1 # nobody waits for a network that is not there
}

join_model() { # the demo model, where tests look for it
  [ -f $pack/base/MODEL ] || return
  local file
  file=$(cut -d ' ' -f 3 $pack/base/MODEL)
  export XDG_CACHE_HOME=$work/cache
  mkdir -p "$work/cache/qinfer"
  cat $pack/model-*/part-* >"$work/cache/qinfer/$file"
  if ! (cd "$work/cache/qinfer" && sha256sum --quiet -c "$OLDPWD/$pack/base/MODEL" >>"$log" 2>&1); then
    say "the demo model is incomplete; its tests are skipped"
    rm "$work/cache/qinfer/$file"
  fi
}

# Each result is written at once. Warnings are CI's business: versions differ here.
tests() {
  local files
  mapfile -t files < <(grep -lE 'mark\.gpu\b' tests/test_*.py)
  if [ ${#files[@]} = 0 ]; then
    say "there are no tests marked gpu"
    return
  fi
  GPU_CHECK_TESTS=$results PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 timeout -k 5 "$tests_s" \
    "$python" -m pytest -p gpu_pytest -p xdist.plugin -n "$workers" --dist worksteal -m gpu -v \
    -W default -p no:cacheprovider --basetemp="$work/pytest" --continue-on-collection-errors \
    --durations=15 "${files[@]}" >"$out/tests.log" 2>&1
  local status=$?
  say "tests: $(tail -1 "$out/tests.log") (exit status $status)"
  return $status
}

make_models() { # in the background, while tests run, which are not timed
  exec timeout -k 5 $((tests_s + 20)) nice "$python" scripts/gpu_bench.py --make --out "$result" \
    --work "$models" >>"$out/bench.log" 2>&1
}

bench() { # started anew where the device was lost (75) or the process died
  local start left status
  for ((start = 0; start < most_starts; start++)); do
    left=$((total_s - reserve_s - SECONDS))
    [ $left -lt 15 ] && return
    timeout --foreground -s INT -k 5 $left "$python" scripts/gpu_bench.py --out "$result" \
      --work "$models" --tests "$results" --budget-s $((left - 5)) >>"$out/bench.log" 2>&1
    status=$?
    [ $status = 75 ] || { [ $status -ge 128 ] && [ $status != 137 ]; } || break
  done
  say "measurements: exit status $status, $((start + 1)) starts"
}

nvidia-smi >"$out/machine.txt" 2>&1
install
"$python" -m pip list --disable-pip-version-check >>"$out/machine.txt" 2>/dev/null
join_model
say "installed"
make_models &
making=$!
tests
tests_failed=$?
wait $making
say "models made: exit status $?"
making=
bench
[ -f "$result" ] || { say "nothing was measured; see $out/bench.log"; tail -20 "$out/bench.log"; exit 1; }
"$python" scripts/gpu_table.py "$result" | tee "$out/table.md"
say "done: $result"
[ $tests_failed = 0 ]
