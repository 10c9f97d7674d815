#!/bin/sh
# Print the path of a Python that runs and is new enough, or say what to type and exit 1.
# Usage: dev/find_python.sh 3.12 | python3.12 | /path/to/python [MAKE-TARGET]
# Looks on PATH first, then where pyenv and uv keep theirs. A pyenv shim of a version that is not
# switched on exists on PATH but does not run, so a candidate counts only after it has run.
wanted="$1"
target="${2:-quickstart}"
case "$wanted" in [0-9]*) wanted="python$wanted" ;; esac

candidates() { # COMMAND ...: run each Python of that name until one does the command
    name="$1"
    version="${name#python}"
    shift
    for candidate in "$name" \
        "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version"*/bin/python \
        "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}/cpython-$version"*/bin/python; do
        "$candidate" "$@" 2>/dev/null && return 0
    done
    return 1
}
path='import sys; sys.version_info >= (3, 11) or sys.exit(1); print(sys.executable)'

candidates "$wanted" -c "$path" && exit 0
if version="$(candidates "$wanted" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')"; then
    echo "$wanted is Python $version; Tinkex needs Python 3.11 or newer." >&2
else
    echo "No $wanted on PATH, under pyenv or under uv; Tinkex needs Python 3.11 or newer." >&2
fi
for version in 3.13 3.12 3.11 3.14; do
    if candidates "python$version" -c "$path" >/dev/null; then
        echo "Python $version is here. Type: make $target PYTHON=$version" >&2
        exit 1
    fi
done
echo "Without root, uv brings one (https://docs.astral.sh/uv): uv python install 3.12 && make $target PYTHON=3.12" >&2
exit 1
