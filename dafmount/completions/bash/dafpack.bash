# Completion of dafpack for bash. Where nothing is said here, bash completes names of files.

_dafpack() {
  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} words=
  COMPREPLY=()
  case $before in
    --compression)
      words='blosc_zstd_bitshuffle blosc_lz4_bitshuffle zstd zstd_bitshuffle gzip gzip_shuffle'
      ;;
    --target-chunk-kb | --compression-level | -j | --jobs | --include | --exclude) return ;;
    *)
      [[ $current == -* ]] || return
      words='--unpack --target-chunk-kb --compression --compression-level --include --exclude -j --jobs --overwrite
        -q --quiet -h --help --version'
      ;;
  esac
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}

complete -o bashdefault -o default -F _dafpack dafpack
