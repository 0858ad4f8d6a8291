"""Sources: one file per checkpoint layout. Every layout is brought to a timm architecture and a timm state dict."""
