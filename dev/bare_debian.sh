#!/usr/bin/env bash
# The README's two commands on a bare Debian: what `mmdebstrap` makes of a release, its own Python
# without python3-venv or pip, no git, no npm, no compiler, an ordinary user whose home has a space in
# its name. Prints the time and disk of each target and what it left outside the clone and the cache
# folder; exits 1 when one fails, or when `test` left anything there.
# Usage, as root: dev/bare_debian.sh [bookworm|trixie] [TARGET ...]
# Wants mmdebstrap. The network's own settings (proxies, package index, certificates) are passed on.
set -euo pipefail
cd "$(dirname "$0")/.."
release="${1:-bookworm}"
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(quickstart test)

if [ "$(id -u)" != 0 ] || ! command -v mmdebstrap >/dev/null; then
    echo "this needs root and mmdebstrap: sudo apt install mmdebstrap, then sudo $0" >&2
    exit 1
fi
# Mounts of a namespace of our own go with this process, however it ends.
if [ -z "${BARE_DEBIAN_UNSHARED:-}" ]; then
    BARE_DEBIAN_UNSHARED=1 exec unshare --mount --pid --fork --kill-child "$0" "$release" "${targets[@]}"
fi
root="$(mktemp -d)"
trap 'umount --recursive --lazy "$root/proc" "$root/dev" 2>/dev/null || true; rm -rf --one-file-system "$root"' EXIT

mmdebstrap --quiet --variant=minbase --include=python3,make,ca-certificates "$release" "$root"
cp /etc/resolv.conf /etc/hosts "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --make-rslave "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"

home="/home/new comer"
chroot "$root" useradd --create-home --home-dir "$home" newcomer
clone="$root$home/tinkex"
mkdir "$clone"
git ls-files -z | tar --create --null --files-from=- | tar --extract --directory "$clone"
chroot "$root" chown -R newcomer: "$home"

inside() {
    chroot --userspec=newcomer "$root" env -i HOME="$home" USER=newcomer LANG=C.UTF-8 \
        PATH=/usr/local/bin:/usr/bin:/bin SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
        ${PIP_INDEX_URL:+PIP_INDEX_URL="$PIP_INDEX_URL"} ${https_proxy:+https_proxy="$https_proxy"} \
        ${http_proxy:+http_proxy="$http_proxy"} ${no_proxy:+no_proxy="$no_proxy"} "$@"
}
# Every file that an ordinary user can leave behind, but for those of the clone, our cache folder,
# pip's, and what the next group of workers removes of one that a test killed.
outside() {
    (cd "$root" && find ".$home" tmp var/tmp dev/shm \( -path ".$home/tinkex" \
        -o -path ".$home/.cache/tinkex" -o -path ".$home/.cache/pip" -o -path "tmp/tinkex-group-*" \) \
        -prune -o -not -type d -print) | sort
}
echo "Debian $release, $(inside python3 --version), $(nproc) cores, as an ordinary user"
for target in "${targets[@]}"; do
    outside >"$root/before"
    began=$(date +%s)
    outcome=passed
    inside make --no-print-directory -C "$home/tinkex" "$target" || outcome=FAILED
    seconds=$(($(date +%s) - began))
    echo "make $target $outcome: $((seconds / 60)) min $((seconds % 60)) s, load $(cut -d' ' -f1 /proc/loadavg)"
    inside sh -c 'du -sh --total "$HOME/tinkex/.venv" "$HOME" | sed "s/^/  disk /"'
    outside | comm -13 "$root/before" - >"$root/left"
    cut -d/ -f1-5 "$root/left" | uniq -c | sed 's/^/  left behind, files: /'
    [ "$outcome" = passed ] || exit 1
    if [ "$target" = test ] && [ -s "$root/left" ]; then
        echo "make test left files outside the clone and the cache folder" >&2
        exit 1
    fi
done
echo "bare Debian $release: ${targets[*]} passed"
