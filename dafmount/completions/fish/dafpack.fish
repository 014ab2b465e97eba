# Completion of dafpack for fish.

set -l codecs blosc_zstd_bitshuffle blosc_lz4_bitshuffle zstd zstd_bitshuffle gzip gzip_shuffle

complete -c dafpack -l unpack -d 'Write everything flat'
complete -c dafpack -l target-chunk-kb -x -d 'Size of a chunk before compression, in KiB'
complete -c dafpack -l compression -x -a "$codecs" -d Codec
complete -c dafpack -l compression-level -x -d 'How hard to compress'
complete -c dafpack -l include -x -d 'Write only properties that match'
complete -c dafpack -l exclude -x -d 'Do not write properties that match'
complete -c dafpack -s j -l jobs -x -d 'Threads that compress'
complete -c dafpack -l overwrite -d 'Replace an existing directory or archive'
complete -c dafpack -s q -l quiet -d 'No progress bar and no notes'
complete -c dafpack -s h -l help -d 'Show a summary of the options'
complete -c dafpack -l version -d 'Show the version'
