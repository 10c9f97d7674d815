#!/bin/sh
# `make system`: Debian's Chromium, where it is absent and can be had. Playwright's own download is
# not used. Nothing else of this repository installs into the system.
command -v chromium >/dev/null 2>&1 && exit 0
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
  echo "SYSTEM=1: apt-get installs chromium and fonts-dejavu-core into this system, about 130 packages" >&2
  patient="-o Acquire::Retries=5 -o DPkg::Lock::Timeout=300"
  apt-get $patient update -qq
  DEBIAN_FRONTEND=noninteractive apt-get $patient install -y -qq chromium fonts-dejavu-core && exit 0
fi
echo "SYSTEM=1: chromium cannot be installed here (it takes root and apt-get): browser tests skip" >&2
