#!/bin/sh
# Make sure that PostgreSQL's server programs are here, for the tests that start their own cluster.
# Installs Debian's package when that is possible; otherwise says loudly what will not be tested.
find_initdb() { command -v initdb || ls /usr/lib/postgresql/*/bin/initdb 2>/dev/null; }

[ -n "$(find_initdb)" ] && exit 0
if command -v apt-get >/dev/null; then
  sudo=""
  [ "$(id -u)" -eq 0 ] || sudo="sudo -n"
  # create_main_cluster=false: we want the programs, not a running service.
  $sudo mkdir -p /etc/postgresql-common &&
    echo "create_main_cluster = false" | $sudo tee /etc/postgresql-common/createcluster.conf >/dev/null
  get="$sudo apt-get -o Acquire::Retries=5 -o DPkg::Lock::Timeout=300"
  $get install -y -q --no-install-recommends postgresql >/dev/null 2>&1 ||
    { $get update -q >/dev/null 2>&1
      $get install -y -q --no-install-recommends postgresql >/dev/null 2>&1; }
fi
[ -n "$(find_initdb)" ] && exit 0
echo "######################################################################" >&2
echo "## PostgreSQL is not here and could not be installed.               ##" >&2
echo "## The store is tested on SQLite ONLY; the PostgreSQL half is       ##" >&2
echo "## SKIPPED. Install it: apt-get install postgresql                  ##" >&2
echo "######################################################################" >&2
