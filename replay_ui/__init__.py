"""The replay debugger: a Streamlit app over the gateway's HTTP API; it loads no model."""
