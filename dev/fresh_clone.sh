#!/usr/bin/env bash
# A newcomer's first ten minutes: clone into an empty folder, `make quickstart`, `make test`, and
# nothing else typed. Exits 1 when one of them fails, or the quickstart took longer than it may or
# learned too little. Usage: dev/fresh_clone.sh [FOLDER] [TARGET ...]
# QUICKSTART_MAX_S (300) is for machines that are busy with other things.
set -euo pipefail

source_dir="$(cd "$(dirname "$0")/.." && pwd)"
folder="${1:-$(mktemp -d)/tinkex}"
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(quickstart test)

if [ -e "$folder" ] && [ -n "$(ls -A "$folder")" ]; then
    echo "$folder is not empty" >&2
    exit 1
fi
git clone --quiet "$source_dir" "$folder"
cd "$folder"
export TINKEX_HOME="$folder/.tinkex-home"

for target in "${targets[@]}"; do
    if [ "$target" = quickstart ]; then
        make venv
        began=$(date +%s)
        make quickstart
        seconds=$(($(date +%s) - began))
        echo "quickstart: ${seconds} s after the installs"
        test "$seconds" -le "${QUICKSTART_MAX_S:-300}"
        test -s quickstart/loss.png
        test -s quickstart/adapter/adapter_model.safetensors
        python3 - <<'PY'
import json

lines = map(json.loads, open("quickstart/metrics.jsonl"))
losses = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
print(f"held-out loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] <= losses[0] / 2
PY
    else
        make "$target"
    fi
done
echo "fresh clone: ${targets[*]} passed"
