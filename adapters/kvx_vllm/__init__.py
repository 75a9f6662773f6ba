"""kvx for vLLM: `KvxConnector`, loaded by its entry point or as `kv_connector_module_path=kvx_vllm.connector`."""
