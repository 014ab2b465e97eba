# Completion of dafmount for fish.

function __dafmount_words
    printf '%s\n' \
        cache=\t'memory for decoded chunks' \
        spool=\t'where compressed ZIP entries are decoded to' \
        spool-size=\t'most bytes of such copies' \
        layout=1.0\t'version of FilesDaf that the mount shows' \
        layout=1.1\t'version of FilesDaf that the mount shows' \
        shards\t'show the packed shards beside the flat files' \
        verify=off\t'check no checksums' \
        verify=auto\t'check the checksums that cost little' \
        verify=all\t'check all checksums' \
        timeout=\t'longest wait for the source' \
        refresh=\t'how often to look whether the source changed' \
        decoders=\t'threads that decode ahead of sequential readers' \
        readahead=\t'how far the kernel reads ahead' \
        nonempty\t'mount over a directory that has entries' \
        uid=\t'owner of everything shown' \
        gid=\t'group of everything shown' \
        umask=\t'permission bits to leave out of everything' \
        fmask=\t'permission bits to leave out of files' \
        dmask=\t'permission bits to leave out of directories' \
        fsname=\t'what /proc/mounts shows as the source' \
        header-file=\t'headers to send to a web server' \
        header=\t'a header to send to a web server' \
        user=\t'name to log in with at a web server' \
        password-file=\t'its first line is the password for a web server' \
        cacert=\t'certificates to trust' \
        retries=\t'how often a request is repeated' \
        connections=\t'most requests at the same time' \
        cache-dir=\t'keep what was fetched here' \
        cache-dir-size=\t'most bytes kept there' \
        allow_other\t'let every user read the mount' \
        allow_root\t'let root read the mount, too' \
        auto_unmount\t'unmount when the server dies' \
        default_permissions\t'let the kernel check permissions' \
        max_read=\t'largest read request of the kernel' \
        ro\t'read-only; implied' \
        noauto\t'do not mount at boot' \
        user\t'let users mount' \
        _netdev\t'wait for the network' \
        comment=\t'for other programs'
end

function __dafmount_mountpoints
    while read -l source where kind rest
        test "$kind" = fuse.dafmount; and printf '%b\n' $where
    end </proc/self/mounts
end

complete -c dafmount -s f -l foreground -d 'Stay in the foreground, log to the terminal'
complete -c dafmount -s o -x -a '(__fish_complete_list , __dafmount_words)' -d 'Options of the mount'
complete -c dafmount -s u -l unmount -x -a '(__dafmount_mountpoints)' -d 'Take a mount away'
complete -c dafmount -s l -l list -d 'Show every mount and how it is doing'
complete -c dafmount -l status -x -a '(__dafmount_mountpoints)' -d 'Show the counters of a mount'
complete -c dafmount -l json -d 'List or status as JSON'
complete -c dafmount -s v -l verbose -d 'Log more'
complete -c dafmount -l log-file -r -F -d 'Append the log to a file'
complete -c dafmount -s h -l help -d 'Show a summary of the options'
complete -c dafmount -l version -d 'Show the version'
