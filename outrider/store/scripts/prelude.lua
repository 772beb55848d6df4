-- Shared by all session scripts.
-- KEYS, always all five, in one hash slot: 1 state hash, 2 token ids, 3 classes, 4 kinds, 5 KV directory.

local function refresh(ttl_ms)
  for i = 1, #KEYS do
    redis.call('PEXPIRE', KEYS[i], ttl_ms)
  end
end

-- Whether the session is there; one that was deleted has a mark in place of its state for a while.
local function known()
  return redis.call('HEXISTS', KEYS[1], 'lease.fence') == 1
end

-- The reply that refuses this fencing number, or nil if it is the current one. Equality, not order: a number from the
-- future means that a failover lost the lease that gave it; its holder has to restore the session first.
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

local function grant(owner, given, lease_ms)
  local fence = tonumber(given)
  local expires = integer(now_ms() + tonumber(lease_ms))
  redis.call('HSET', KEYS[1], 'lease.owner', owner, 'lease.fence', integer(fence), 'lease.expires_ms', expires)
  return {'OK', fence, expires}
end

-- Write tokens [start, start + #classes) behind or over the log. What is there already must be the same: a repeat after
-- a lost reply. Only the rest is new. Returns the reply that refuses it, or nil and the log's length.
local function write_log(start, ids, classes, kinds)
  local count, length = #classes, redis.call('STRLEN', KEYS[3])
  if start > length then
    return {'GAP', length}
  end
  local old = math.min(length - start, count)
  if old > 0 then
    local old_ids = redis.call('GETRANGE', KEYS[2], start * 4, (start + old) * 4 - 1)
    local old_classes = redis.call('GETRANGE', KEYS[3], start, start + old - 1)
    if old_ids ~= string.sub(ids, 1, old * 4) or old_classes ~= string.sub(classes, 1, old) then
      return {'CONFLICT', length}
    end
  end
  if old < count then
    redis.call('APPEND', KEYS[2], string.sub(ids, old * 4 + 1))
    redis.call('APPEND', KEYS[3], string.sub(classes, old + 1))
    if kinds ~= '' then
      redis.call('SETRANGE', KEYS[4], length, string.sub(kinds, old + 1))
    end
  end
  return nil, length + count - old
end
