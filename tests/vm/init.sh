#!/bin/busybox sh
# The guest's first process. The host's root comes over 9p, read-only, with a layer of memory above;
# Soft-RoCE (rdma_rxe) makes an RDMA device of a veth pair. Runs /job in it, and ends the machine
# with the job's exit status: qemu exits with twice that plus one.
b=/bin/busybox
say() { echo "guest: $1 at $($b cut -d' ' -f1 /proc/uptime) s"; }
finish() {
    echo "JOB ENDED WITH $1"
    $b sync
    $b printf "\\$($b printf %o "$1")" | $b dd of=/dev/port bs=1 seek=244 conv=notrunc 2>/dev/null
    $b poweroff -f
}
$b mount -t proc none /proc
$b mount -t sysfs none /sys
$b mount -t devtmpfs none /dev
for module in /modules/*.ko; do
    parameters=
    case "$module" in *-brd.ko) parameters="rd_nr=1 rd_size=131072" ;; esac
    $b insmod "$module" $parameters || finish 99
done
$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro host /host || finish 98
$b mount -t tmpfs none /layer
$b mkdir /layer/upper /layer/work
$b mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work none /root || finish 97
for kind in proc sysfs:sys devtmpfs:dev tmpfs:run tmpfs:tmp tmpfs:dev/shm; do
    $b mkdir -p "/root/${kind#*:}"
    $b mount -t "${kind%:*}" none "/root/${kind#*:}"
done
$b mount -t cgroup2 none /root/sys/fs/cgroup
$b hostname guest
$b cp /job /root/run/job
for command in \
    "ip link set lo up" \
    "ip link add roce0 mtu 4200 type veth peer name roce1 mtu 4200" \
    "ip addr add 10.99.0.1/24 dev roce0" \
    "ip link set roce0 up" \
    "ip link set roce1 up" \
    "rdma link add rxe0 type rxe netdev roce0"; do
    $b chroot /root /bin/sh -c "PATH=/usr/sbin:/usr/bin:/sbin:/bin $command" || finish 96
done
ulimit -l unlimited
say "RDMA device is there"
$b chroot /root /bin/bash /run/job
status=$?
say "job is done"
finish "$status"
