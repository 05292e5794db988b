#!/usr/bin/env bash
# Installs a Debian package in a fresh root of Debian, with nothing else, and runs README's tour there.
#
#     debian-test.sh PACKAGE.deb [SUITE]
#
# Needs root, mmdebstrap, and a mirror of Debian. The root has a network of its own, with loopback alone.
set -euo pipefail
package="$(realpath "$1")"
suite="${2:-bookworm}"
cd "$(dirname "$0")/../.."
root="$(mktemp -d)"
trap 'rm -rf --one-file-system "$root"' EXIT

mmdebstrap --quiet --variant=minbase "$suite" "$root" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}"
install -m 644 "$package" "$root/package.deb"
python3 - "$root" <<'PYTHON'
import re
import sys

text = open("README.md", encoding="utf-8").read()
tour = re.search(r"## A tour of the shell\n\n```sh\n(.*?)```\n\n```text\n(.*?)```", text, re.S)
with open(sys.argv[1] + "/tour.sh", "w", encoding="utf-8") as file:
    file.write("set -euo pipefail\n" + tour[1])
with open(sys.argv[1] + "/expected", "w", encoding="utf-8") as file:
    file.write(tour[2])
PYTHON
# Everything that it needs is in the package or in the smallest Debian. dpkg checks the dependencies that it declares.
chroot "$root" dpkg --install /package.deb
for file in usr/bin/rpc-server usr/bin/rpc-cli usr/share/man/man1/rpc-cli-call.1.gz usr/lib/systemd/system/rpc-server.service \
    usr/share/bash-completion/completions/rpc-cli usr/share/zsh/vendor-completions/_rpc-cli \
    usr/share/fish/vendor_completions.d/rpc-cli.fish; do
    chroot "$root" dpkg --listfiles rpc-server | grep -qx "/$file" || { echo "the package lacks $file" >&2; exit 1; }
done
chroot "$root" bash -n /usr/share/bash-completion/completions/rpc-cli
# The end of its first process ends all of the tour's, also the servers.
unshare --net --pid --fork --kill-child --mount bash -euo pipefail -c '
    ip link set lo up
    mount -t proc proc "$0/proc"
    mkdir "$0/tour"
    timeout 300 chroot "$0" /usr/bin/env -i HOME=/tour PATH=/usr/bin:/bin bash -c "cd /tour && bash /tour.sh"
' "$root" >"$root/said"
cat "$root/said"
grep -v "^listening on " "$root/said" | diff - "$root/expected"
chroot "$root" dpkg --purge rpc-server
[ ! -e "$root/usr/bin/rpc-cli" ]
echo "the package works in a fresh $suite"
