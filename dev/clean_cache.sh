#!/bin/sh
# Remove what Tinkex keeps outside its clone and can make again: the default model, fingerprints of
# models, environments with foreign packages. Names each folder with its size. Other things that lie
# in $TINKEX_CACHE are not touched.
cache="${TINKEX_CACHE:-$HOME/.cache/tinkex}"
found=0
for folder in "$cache/models" "$cache/fingerprints" "$cache/venvs" \
    "$HOME/.cache/tinkex-peers" "$HOME/.cache/tinkex-clients"; do  # the last two: before 0.1.0
    [ -d "$folder" ] || continue
    found=1
    echo "removing $(du -sh "$folder" | tr '\t' ' ')"
    rm -rf "$folder"
done
[ "$found" = 1 ] || echo "nothing in $cache"
