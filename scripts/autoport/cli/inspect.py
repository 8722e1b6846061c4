"""`autoport inspect`: what a checkpoint holds, from its headers."""

from autoport.cli.arguments import AsJson, Source


def command(source: Source, as_json: AsJson = False) -> None:
    """Show a checkpoint's files, dtypes and keys without reading any tensor."""
    from autoport.cli.output import note, print_json, print_table
    from autoport.research.checkpoint import read_checkpoint
    from autoport.research.config import load_config
    from autoport.research.inspection import bytes_by_file, count_dtypes, fold_keys
    from autoport.research.layout import describe_layout
    from autoport.research.nested import find_text_config
    from autoport.research.source import open_source

    opened = open_source(source)
    checkpoint = read_checkpoint(opened)
    config = load_config(opened) if opened.config_name in opened.sizes else {}
    layout = describe_layout(checkpoint, find_text_config(config)[1])
    for text in checkpoint.notes:
        note(f"note: {text}")
    keys = fold_keys(checkpoint)
    if as_json:
        print_json(
            {
                "source": checkpoint.source,
                "files": bytes_by_file(checkpoint),
                "dtypes": count_dtypes(checkpoint),
                "total_bytes": checkpoint.total_bytes,
                "bytes_read": checkpoint.bytes_read,
                "num_tensors": len(checkpoint.tensors),
                "layout": layout,
                "keys": keys,
            }
        )
        return
    print_table(
        ("File", "Tensor bytes"), [(name, f"{size:,}") for name, size in bytes_by_file(checkpoint).items()]
    )
    print_table(("Dtype", "Tensors"), list(count_dtypes(checkpoint).items()))
    print_table(("Part", "Layout", "Seen in"), [(item.part, item.verdict, item.evidence) for item in layout])
    print_table(
        ("Key", "{i}", "Shape", "Dtype"), [(row.key, row.indices, list(row.shape), row.dtype) for row in keys]
    )
    read = f"{checkpoint.bytes_read:,} bytes read"
    print(f"{len(checkpoint.tensors)} tensors, {checkpoint.total_bytes:,} bytes; {read}")
