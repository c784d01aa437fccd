"""Published KV compression schemes, written anew, that kvass' codecs are measured against."""
