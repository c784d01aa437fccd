"""What `kvass doctor` says of a Redis store: what was found, and what to change about it."""

import ipaddress
from collections.abc import Iterator

from kvass.tiers.redis.link import Link, facts

Advice = tuple[str, str | None]


def advice(link: Link, ttl_seconds: int) -> Iterator[Advice]:
    """Raises TierError where no server answers."""
    found = [facts(info) for (info,) in link.everywhere([("INFO",)])]
    one = found[0]
    name = "Valkey" if one.get("server_name") == "valkey" else "Redis"
    version = one.get("valkey_version") or one.get("redis_version", "of unknown version")
    yield f"{name} {version} at {link.address}", None
    yield from _access(link)
    if link.address.cluster:
        yield from _cluster(link, len(found))
    elif one.get("cluster_enabled") == "1":
        yield "the server is one of a cluster", "write redis_url with redis+cluster:// or rediss+cluster://"
    if any(node.get("role") == "slave" for node in found):
        yield "the server is a replica, which takes no writes", "name its primary in redis_url"
    yield _memory(found, ttl_seconds)


def _access(link: Link) -> Iterator[Advice]:
    address = link.address
    exposed = any(not _is_local(host) for host, _ in address.hosts)
    if address.tls:
        yield "connections use TLS", None
    else:
        fix = "stored state crosses the network unencrypted; use rediss:// if others can listen"
        yield "connections do not use TLS", fix if exposed else None
    if address.password:
        yield "a password is used", None
    else:
        fix = "whoever reaches it reads and replaces stored state; set requirepass and redis_password_file"
        yield "no password is used", fix if exposed else None


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _cluster(link: Link, masters: int) -> Iterator[Advice]:
    states = {
        facts(info).get("cluster_state", "unknown") for (info,) in link.everywhere([("CLUSTER", "INFO")])
    }
    well = states == {"ok"}
    fix = "see `redis-cli cluster nodes`: slots without a running master are misses"
    yield f"cluster of {masters} masters, state {', '.join(sorted(states))}", None if well else fix


def _memory(found: list[dict[str, str]], ttl_seconds: int) -> Advice:
    limits = [int(node.get("maxmemory", 0)) for node in found]
    policies = {node.get("maxmemory_policy", "unknown") for node in found}
    used = sum(int(node.get("used_memory", 0)) for node in found)
    text = f"maxmemory {sum(limits) if all(limits) else 'unlimited'}, {used} bytes used, policy "
    text += ", ".join(sorted(policies))
    if not all(limits):
        return text, "set maxmemory, and maxmemory-policy allkeys-lru: without them Redis grows until killed"
    if "noeviction" in policies:
        return text, "set maxmemory-policy allkeys-lru: once full, nothing more would be stored"
    if not ttl_seconds and any(policy.startswith("volatile") for policy in policies):
        return (
            text,
            "set maxmemory-policy allkeys-lru, or redis_ttl_seconds: what never expires is not evicted",
        )
    return text, None
