#!/bin/sh
# Debian's Chromium, where it is absent and can be had. Playwright's own download is not used.
command -v chromium >/dev/null 2>&1 && exit 0
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium fonts-dejavu-core && exit 0
fi
echo "chromium cannot be installed here: the browser tests will say so and skip" >&2
