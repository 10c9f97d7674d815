#!/bin/sh
# Print the path of a Python that runs, or say where it was looked for and exit 1.
# Usage: dev/find_python.sh 3.12 | python3.12 | /path/to/python
# Looks on PATH first, then where pyenv and uv keep theirs. A pyenv shim of a version that is not
# switched on exists on PATH but does not run, so a candidate counts only after it has run.
wanted="$1"
case "$wanted" in [0-9]*) wanted="python$wanted" ;; esac
version="${wanted#python}"
for candidate in "$wanted" \
    "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version"*/bin/python \
    "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}/cpython-$version"*/bin/python; do
    "$candidate" -c 'import sys; print(sys.executable)' 2>/dev/null && exit 0
done
echo "no $wanted on PATH, under pyenv or under uv" >&2
exit 1
