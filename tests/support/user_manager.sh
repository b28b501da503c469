# Run by tests/support/user_manager.py as the first process of namespaces of its own: mounts, processes, cgroups.
# Everything that it mounts, starts and makes under /run and /var/log is gone with this process.
#
#     user_manager.sh HOME UID [CLOSED WANTED]…
#
# WANTED: a folder that the user has to read, CLOSED: the folder above it that others can't enter.
set -eu
home=$1 uid=$2
shift 2

mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/systemd/system /run/systemd/journal /run/lock /run/keep "/run/user/$uid"
touch /run/systemd/journal/flushed  # The journal is on "disk" from the start, so that users have their own.
chown "$uid:$uid" "/run/user/$uid"
chmod 700 "/run/user/$uid"

# One hierarchy alone, whatever the machine has. The user gets that part of it which logind would give
# him: its name is how journald knows whose a line is.
umount -l /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
session=/sys/fs/cgroup/user.slice/user-$uid.slice/user@$uid.service
mkdir -p "$session"
for file in . cgroup.procs cgroup.subtree_control cgroup.threads; do
    chown "$uid:$uid" "$session/$file"
done

{ cat /etc/passwd; echo "trial:x:$uid:$uid::$home:/bin/sh"; } > /run/passwd
{ cat /etc/group; echo "trial:x:$uid:"; } > /run/group
printf '[Journal]\nStorage=persistent\nAudit=\nReadKMsg=no\nForwardToWall=no\n' > /run/journald.conf
echo 6f6d6c78646f6d6c78646f6d6c78640a > /run/machine-id
for file in passwd group machine-id; do
    chmod 644 "/run/$file"
    mount --bind "/run/$file" "/etc/$file"
done
mount --bind /run/journald.conf /etc/systemd/journald.conf
mkdir -p /var/log/journal
mount -t tmpfs -o mode=755 tmpfs /var/log/journal

number=0
for word in "$@"; do  # First all that is wanted is kept, and then the closed folders are covered.
    number=$((number + 1))
    if [ $((number % 2)) = 0 ]; then
        mkdir "/run/keep/$number"
        mount --bind "$word" "/run/keep/$number"
    fi
done
number=0
for word in "$@"; do
    number=$((number + 1))
    if [ $((number % 2)) = 1 ]; then
        mountpoint -q "$word" || mount -t tmpfs -o mode=755 tmpfs "$word"
    else
        mkdir -p "$word"
        mount --bind "/run/keep/$number" "$word"
    fi
done

"$(command -v systemd-journald || echo /lib/systemd/systemd-journald)" > "$home/journald.txt" 2>&1 &
echo ready
while :; do wait || :; sleep 1; done  # The first process of a namespace takes in its orphans.
