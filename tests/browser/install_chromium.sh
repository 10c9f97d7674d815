#!/bin/sh
# Debian's Chromium, where it is absent and can be had. Playwright's own download is not used.
command -v chromium >/dev/null 2>&1 && exit 0
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
  patient="-o Acquire::Retries=5 -o DPkg::Lock::Timeout=300"
  apt-get $patient update -qq
  DEBIAN_FRONTEND=noninteractive apt-get $patient install -y -qq chromium fonts-dejavu-core && exit 0
fi
echo "chromium cannot be installed here: the browser tests will say so and skip" >&2
