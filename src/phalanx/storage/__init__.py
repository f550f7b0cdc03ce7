"""Object stores: URLs, reads by ranges, uploads, retries, and a node-local cache of what was read.

A thin layer over obstore (S3, GCS, Azure, HTTP) and huggingface_hub (`hf://`). It adds what training needs and they do
not have: retries that are counted and end with a Phalanx error, checksums of our own, and the cache.
"""
