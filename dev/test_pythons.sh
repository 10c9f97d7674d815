#!/usr/bin/env bash
# Run one make target on every Python that Tinkex supports and this machine has, each in a virtual
# environment of its own; say what came of each, and name those that are not here. Exits 1 when one
# failed. The system's own /usr/bin/python3 is one of them: Debian 12's is 3.11.2, older than most.
# Usage: dev/test_pythons.sh TARGET [--without VERSION]
set -uo pipefail
cd "$(dirname "$0")/.."
target="$1"
tried=" ${3:-} "
report=()
status=0
for wanted in 3.11 3.12 3.13 3.14 /usr/bin/python3; do
    if ! python="$(sh dev/find_python.sh "$wanted" 2>/dev/null)"; then
        report+=("Python $wanted: not found here (PATH, pyenv, uv), or too old, so not tested")
        continue
    fi
    version="$("$python" -c 'import platform; print(platform.python_version())')"
    case "$tried" in *" $version "*) continue ;; esac
    tried+="$version "
    if make --no-print-directory "$target" PYTHON="$python"; then
        report+=("Python $version: make $target passed ($python)")
    else
        report+=("Python $version: make $target FAILED ($python)")
        status=1
    fi
done
printf '%s\n' "${report[@]}"
exit "$status"
