# Process 1 once the host's file system is there: the network, two Soft-RoCE devices, the command, the end.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
here=/run/vm
b=$here/busybox
off() {
    $b sync
    echo o > /proc/sysrq-trigger
    $b sleep 60
}
give_up() { # without a status: the host then shows the kernel's log
    echo "<3>vm: $1 failed" > /dev/kmsg
    off
}
$b mkdir -p /dev/pts /dev/shm /run/lock
$b mount -t devpts devpts /dev/pts
$b mount -t tmpfs shm /dev/shm
$b ln -sf /proc/self/fd /dev/fd
$b ln -sf fd/0 /dev/stdin
$b ln -sf fd/1 /dev/stdout
$b ln -sf fd/2 /dev/stderr
$b hostname rdma-vm

port() { # the serial port of this name
    for place in /sys/class/virtio-ports/*; do
        [ "$($b cat $place/name)" = "$1" ] && echo /dev/${place##*/}
    done
}

# Each device on one end of a veth pair. Link-local addresses, and with them gids, are there at once without
# the search for duplicates. Jumbo frames allow RDMA's largest path MTU.
for scope in all default; do
    echo 0 > /proc/sys/net/ipv6/conf/$scope/accept_dad
done
/bin/ip -batch - <<'IP' || give_up "the veth pair"
link set lo up
link add veth0 mtu 9000 address 02:00:00:00:00:01 type veth peer name veth1 mtu 9000 address 02:00:00:00:00:02
addr add 10.77.0.1/24 dev veth0
addr add 10.77.0.2/24 dev veth1
link set veth0 up
link set veth1 up
IP
# Both addresses are this machine's own. So that packets between them cross the pair nevertheless, rules in
# front of the table of local addresses send them out, and the ends take what seems to come from themselves.
for name in all veth0 veth1; do
    echo 1 > /proc/sys/net/ipv4/conf/$name/accept_local
    echo 0 > /proc/sys/net/ipv4/conf/$name/rp_filter
done
/bin/ip -batch - <<'IP' || give_up "the routes"
rule add pref 100 lookup local
rule del pref 0
rule add pref 10 iif lo from 10.77.0.1 to 10.77.0.2 lookup 101
rule add pref 10 iif lo from 10.77.0.2 to 10.77.0.1 lookup 102
route add 10.77.0.2 dev veth0 table 101
route add 10.77.0.1 dev veth1 table 102
neigh add 10.77.0.2 lladdr 02:00:00:00:00:02 dev veth0 nud permanent
neigh add 10.77.0.1 lladdr 02:00:00:00:00:01 dev veth1 nud permanent
IP
for number in 0 1; do
    /usr/bin/rdma link add rxe$number type rxe netdev veth$number || give_up "adding rxe$number"
done
echo "<3>vm: ready after $($b cut -d' ' -f1 /proc/uptime) s" > /dev/kmsg

# The command writes into pipes, so that it may open /dev/stdout again; a reader each takes them to the host.
$b mkfifo $here/out $here/err
$b cat $here/out > "$(port out)" & readers=$!
$b cat $here/err > "$(port err)" & readers="$readers $!"
$b setsid /bin/sh $here/command.sh > $here/out 2> $here/err < /dev/null
status=$?
echo "<3>vm: the command ended with $status after $($b cut -d' ' -f1 /proc/uptime) s" > /dev/kmsg
# What it left behind may hold the pipes open: the readers get some seconds, no more.
for _ in 1 2 3 4 5 6 7 8 9 10; do
    left=
    for reader in $readers; do
        # A reader that has ended stays as a zombie: nobody waits for it here.
        case "$($b cat /proc/$reader/stat 2> /dev/null)" in *") Z "* | "") ;; *) left=yes ;; esac
    done
    [ -z "$left" ] && break
    $b usleep 300000
done
echo $status > "$(port status)"
off
