#!/bin/busybox sh
# Process 1 of the initramfs: the host's file system under a layer of its own, then second.sh in it.
b=/bin/busybox
give_up() {
    echo "<3>vm: $1 failed" > /dev/kmsg
    echo o > /proc/sysrq-trigger
    $b sleep 60
}
load() {
    while read -r name; do
        $b insmod "/modules/$name.ko" || give_up "loading $name"
    done < "/modules/$1"
}
$b mkdir -p /proc /sys /dev /host /layer /merged
$b mount -t proc proc /proc
$b mount -t sysfs sysfs /sys
$b mount -t devtmpfs dev /dev
load files
$b mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose host /host || give_up "mounting the host"
$b mount -t tmpfs -o size=75% layer /layer
$b mkdir /layer/upper /layer/work
$b mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work merged /merged || give_up "the overlay"
load rdma
for place in dev proc sys; do
    $b mount --move /$place /merged/$place
done
$b mount -t tmpfs run /merged/run
$b mkdir /merged/run/vm
$b cp /bin/busybox /job/* /merged/run/vm/
exec $b switch_root /merged /run/vm/busybox sh /run/vm/second.sh
