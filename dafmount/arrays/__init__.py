"""A Daf's properties as numpy and scipy arrays; the front door is `dafmount.open`."""
