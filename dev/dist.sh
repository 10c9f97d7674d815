#!/usr/bin/env bash
# Build a wheel and an sdist into dist/ and try both in empty environments: the wheel on every
# Python that Tinkex supports and this machine has (the SDK alone, then with its server), the sdist
# on one, and the command through pipx and uvx. Exits 1 when anything fails. Usage: dev/dist.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python="$1"
top="$PWD"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
# A home of its own: the SDK joins servers of this user's that run already.
export TINKEX_HOME="$work/home"

"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install -q build pipx twine uv
rm -rf dist
"$work/tools/bin/python" -m build --outdir dist . >"$work/build.log" 2>&1 ||
    { cat "$work/build.log"; exit 1; }
"$work/tools/bin/twine" check --strict dist/*
wheel="$(echo "$top"/dist/*.whl)"
sdist="$(echo "$top"/dist/*.tar.gz)"

smoke() { # PYTHON NAME PACKAGE: install into an empty environment and run it outside the clone
    "$1" -m venv "$work/$2"
    "$work/$2/bin/pip" install -q "$3"
    (cd "$work" && "$work/$2/bin/python" -I "$top/dev/smoke.py" sdk)
}

smoke "$python" sdist "$sdist"
for version in 3.11 3.12 3.13 3.14; do
    if found="$(sh dev/find_python.sh "$version" 2>/dev/null)"; then
        smoke "$found" "py$version" "$wheel"
        "$work/py$version/bin/pip" install -q "$wheel[server]"
        (cd "$work" && "$work/py$version/bin/python" -I "$top/dev/smoke.py" server)
    else
        echo "Python $version: not found here (PATH, pyenv, uv), so not tried"
    fi
done
PIPX_HOME="$work/pipx" "$work/tools/bin/pipx" run --python "$python" --spec "$wheel" tinkex --version
# uv does not read pip's settings, where a machine may have its own package index.
index="${PIP_INDEX_URL:-$("$work/tools/bin/pip" config get global.index-url 2>/dev/null || true)}"
UV_CACHE_DIR="$work/uv" UV_DEFAULT_INDEX="${index:-https://pypi.org/simple}" \
    "$work/tools/bin/uvx" --no-config --python "$python" --from "$wheel" tinkex --version
ls -l dist
