"""Site kinds: how one kind of attention module is recognised and taken apart. One file each."""
