#!/bin/sh
# axe-core, which judges whether people with a keyboard or a screen reader can use the pages, from
# npm into build/axe. Where npm is absent the test that needs it says so and skips.
set -eu
version=4.10.3
target="$(dirname "$0")/../../build/axe"
[ -f "$target/axe-$version.js" ] && exit 0
command -v npm >/dev/null 2>&1 || { echo "npm is not here: axe-core cannot be fetched" >&2; exit 0; }
mkdir -p "$target"
work=$(mktemp -d)
if (cd "$work" && npm pack --silent --fetch-retries=5 "axe-core@$version" >/dev/null 2>&1 && tar xzf axe-core-*.tgz); then
  mv "$work/package/axe.min.js" "$target/axe-$version.js"
else
  echo "axe-core cannot be fetched from npm here" >&2
fi
rm -rf "$work"
