-- Shared by all session scripts.
-- KEYS, always all five, in one hash slot: 1 state hash, 2 token ids, 3 classes, 4 kinds, 5 KV directory.

local function refresh(ttl_ms)
  for i = 1, #KEYS do
    redis.call('PEXPIRE', KEYS[i], ttl_ms)
  end
end

-- The reply that refuses this fencing number, or nil if it is the current one. Equality, not order: a number from the
-- future means that a failover lost the lease that gave it, and somebody else may hold the session by now.
local function refusal(fence)
  local current = redis.call('HGET', KEYS[1], 'lease.fence')
  if not current then
    return {'NOT_FOUND'}
  end
  if tonumber(current) ~= tonumber(fence) then
    return {'FENCED', tonumber(current)}
  end
  return nil
end

local function grant(owner, fence, lease_ms)
  local expires = integer(now_ms() + tonumber(lease_ms))
  redis.call('HSET', KEYS[1], 'lease.owner', owner, 'lease.fence', fence, 'lease.expires_ms', expires)
  return {'OK', tonumber(fence), expires}
end
